"""A process in which some packages can't be found, as on a machine where nobody has installed them: write `SITECUSTOMIZE` as
sitecustomize.py into a folder of PYTHONPATH and name them in the environment."""

from __future__ import annotations

WITHOUT = "TEST_WITHOUT_PACKAGES"
SITECUSTOMIZE = f"""
import os
import sys
from importlib.machinery import PathFinder

missing = os.environ.get("{WITHOUT}", "").split()


class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else super().find_spec(name, path, target)


sys.meta_path[:] = [Others if finder is PathFinder else finder for finder in sys.meta_path]
"""

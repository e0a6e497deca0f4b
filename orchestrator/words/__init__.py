"""Other programs' languages, each as one table that is read both ways (README.md)."""

"""The commands plan, sweep and compare: words in, `orchestrator.asking` answers, tables or JSON out."""

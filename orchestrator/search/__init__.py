"""The search: outer choices from the decision tree, inner choices by dynamic programming, an oracle that checks both."""

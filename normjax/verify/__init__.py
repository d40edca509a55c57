"""The evidence: closed forms against independent oracles."""

"""Evidence for auditors: which policies a stack meets and what proves it, in one folder that verifies itself."""

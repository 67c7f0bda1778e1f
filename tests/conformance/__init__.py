"""A black-box suite for servers that claim OpenAI's Files and Batches contract. See README.md beside this file."""

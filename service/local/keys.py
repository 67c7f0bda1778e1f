"""The keys of a local stack, which last as long as its data: for stored secrets and for receipts of deletions."""

import secrets

from cryptography.fernet import Fernet

from service.local.layout import Layout, write_private_file


def make_keys(layout: Layout) -> None:
    """Create the keys that are missing, in files that only this account can read."""
    if not layout.encryption_keys.exists():
        write_private_file(layout.encryption_keys, f"{Fernet.generate_key().decode()}\n")
    if not layout.receipt_key.exists():
        write_private_file(layout.receipt_key, f"{secrets.token_hex(32)}\n")

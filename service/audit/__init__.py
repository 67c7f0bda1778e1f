"""The audit log: its entries (``log``), the chain that reveals changes (``chain``), and exports (``export``)."""

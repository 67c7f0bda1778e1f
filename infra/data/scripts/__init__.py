"""Files that containers run. A ConfigMap mounts them; the program does not import them."""

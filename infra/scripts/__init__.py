"""Files that containers run: a ConfigMap brings them there. Nothing here is imported."""

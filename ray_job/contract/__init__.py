"""Contract of the service, the infrastructure program and the Ray job. Imports the standard library only."""

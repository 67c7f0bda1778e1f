"""Run ``cloister`` as ``python -m service.cli``."""

from service.cli.app import main

if __name__ == "__main__":
    main()

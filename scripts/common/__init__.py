"""What the scripts share: flags, the way from an error to an exit status, prompts, progress. Nothing of the packages
depends on it.

A script runs from a checkout and uses the packages of that checkout, whether or not they are installed.
"""

import sys
from pathlib import Path

_CHECKOUT = str(Path(__file__).resolve().parents[2])
if _CHECKOUT not in sys.path:
    sys.path.insert(1, _CHECKOUT)

"""Where the checkout is and which files belong to it. Knows nothing of what is inside them."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("pallas_kernels", "jpaged", "models")  # what setup.cfg installs, in the order in which they may import
SCRIPTS = "scripts"  # run from the checkout


@cache
def files() -> tuple[Path, ...]:
    """The files of this checkout that are tracked, or will be once they are added; paths relative to `ROOT`, sorted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = {Path(name) for name in listed.stdout.split("\0") if name}
    return tuple(sorted(path for path in paths if (ROOT / path).is_file()))

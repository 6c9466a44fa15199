"""Print what `pyproject.toml` in the working directory asks for: `python requirements.py [EXTRA…]`.

Images install it before the tree is copied, so that a changed line of code downloads nothing again. Extras that name
our own project (`atropos-durable[embedded]`) are followed.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """The project's own requirements and those of its extras."""
    yield from project["dependencies"]
    own = re.compile(re.escape(project["name"]) + r"\[(.+)\]")
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            found = own.fullmatch(line)
            if found is None:
                yield line
            else:
                yield from requirements(project, found[1].split(","))


if __name__ == "__main__":
    declared = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    print("\n".join(dict.fromkeys(requirements(declared, sys.argv[1:]))))

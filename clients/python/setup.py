"""Builds the package from its present files only: setuptools also installs what an earlier build has left."""

import shutil
from pathlib import Path

from setuptools import setup

# Not all of `build`: a strict editable install is a directory beside this one.
LEFT_BY_BUILDS = Path(__file__).resolve().parent / "build" / "lib"

shutil.rmtree(LEFT_BY_BUILDS, ignore_errors=True)
setup()
shutil.rmtree(LEFT_BY_BUILDS, ignore_errors=True)

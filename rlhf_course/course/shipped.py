"""The notebooks import these functions from here; they are in :mod:`rlhf_course.course.presets`."""
# ruff: noqa: F401

from rlhf_course.course.presets import prepare, shipped

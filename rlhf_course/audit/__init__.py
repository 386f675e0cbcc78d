"""Test a reward model: an audit with bad answers (probes), and a check-up on held-out pairs."""

from rlhf_course.audit.probes import (
    ARGUABLE,
    PASS,
    PROBES,
    RISKS,
    add_negatives,
    audit,
    audit_change,
    make_probes,
)

__all__ = [
    "ARGUABLE",
    "PASS",
    "PROBES",
    "RISKS",
    "add_negatives",
    "audit",
    "audit_change",
    "make_probes",
]

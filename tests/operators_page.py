"""Writes docs/operators.md from the registry: `python -m tests.operators_page`.

What a record's rule is depends on the operands' shapes; the page shows the rules with
which the calls of `tests.expected_rules` run.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import tparmpi as tpm
from tests.expected_rules import EXPECTED
from tparmpi import ops
from tparmpi.sharding import COMBINE, Rule
from tparmpi.sharding.rules import MOVED
from tparmpi.tensors import Operator, Plan, registry

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"

HEADER = """\
# Operators

Written from the operators' records by `python -m tests.operators_page`.

Of each dim a *rule* says that it may be split and

- is **kept** so, or its sum is **pending** (`Partial`) afterwards: nothing is sent;
- is **reduced** by the operator itself, whose members exchange small statistics;
- is **moved**: the elements that another member has afterwards are sent;

or that it is **whole**, and gathered where it is not. Letters stand for the dims of an
example, `(ab)` for one that is made of two, and `...` for any number of dims.
[Sharded tensors](tensors.md) tells how layouts are chosen, and
[Adding an operator](adding-an-operator.md) how rules are written.
`tests/expected_rules.py` holds every operator, with the ledger, to what the mathematics
says of its dims.
"""

MOST_RULES = 4


def text() -> str:
    """Return the page. Local; starts MPI."""
    found = examples()
    sections = []
    for module in modules():
        names = sorted(n for n in ops.__all__ if home(n) is module)
        hidden = sorted(
            record.name
            for record in records()
            if sys.modules[record.forward.__module__] is module
            and record.name not in ops.__all__
        )
        if names or hidden:
            first = (module.__doc__ or "").splitlines()[0].rstrip(".")
            file = module.__name__.replace(".", "/")
            heading = f"## {first}\n\nIn `{file}.py`.\n"
            entries = [entry(name, *found) for name in sorted([*names, *hidden])]
            sections.append("\n".join([heading, *entries]))
    return "\n".join([HEADER, *sections])


def modules() -> list[ModuleType]:
    """The files of operators, by name."""
    found = {home(name) for name in ops.__all__}
    found |= {sys.modules[record.forward.__module__] for record in records()}
    return sorted(found, key=lambda module: module.__name__)


def records() -> list[Operator]:
    """The package's own; a program may have registered others."""
    return [
        record
        for record in registry.values()
        if record.forward.__module__.startswith("tparmpi.")
    ]


def home(name: str) -> ModuleType:
    found = getattr(ops, name)
    function = found.forward if isinstance(found, Operator) else found
    return sys.modules[function.__module__]


def examples() -> tuple[dict[str, list[Plan]], dict[str, list[str]]]:
    """Run the expected rules' calls.

    Returns
    -------
    plans
        For each record those with which it ran.
    made_of
        For each entry the records that it ran.
    """
    plans: dict[str, list[Plan]] = defaultdict(list)
    made_of: dict[str, list[str]] = {}
    originals = {record: record.forward for record in records()}

    def watch(record: Operator) -> None:
        def watched(plan: Plan, *arrays: Any, **scalars: Any) -> Any:
            plans[record.name].append(plan)
            return originals[record](plan, *arrays, **scalars)

        record.forward = watched

    try:
        for record in originals:
            watch(record)
        with tpm.random.scope(seed=1):
            for expected in EXPECTED:
                before = {name: len(found) for name, found in plans.items()}
                arrays = expected.arrays({})
                expected.call(*[tpm.tensor(a, tpm.device()) for a in arrays])
                ran = [n for n, found in plans.items() if len(found) > before.get(n, 0)]
                made_of.setdefault(expected.operator, ran)
    finally:
        for record, forward in originals.items():
            record.forward = forward
    return plans, made_of


def entry(
    name: str, plans: dict[str, list[Plan]], made_of: dict[str, list[str]]
) -> str:
    """One operator: how it is called, what it returns, its rules."""
    public = getattr(ops, name, None)
    record = registry.get(name)
    described = public if public is not None else record
    summary = inspect.getdoc(described).partition("\n\n")[0].replace("\n", " ")
    call = f"`{'tpm.' if public is not None else ''}{name}{signature(described)}`"
    lines = [f"### {name}\n", f"{call}  \n{rst_to_markdown(summary)}\n"]
    if record is None:
        parts = ", ".join(f"`{part}`" for part in made_of.get(name, []))
        lines.append(f"- made of {parts or 'other operators'}")
    else:
        lines += rules(record, plans[name])
    return "\n".join(lines) + "\n"


def signature(described: Any) -> str:
    if not isinstance(described, Operator):
        parameters = inspect.signature(described).parameters.values()
        return str(inspect.Signature([bare(p) for p in parameters]))
    parameters = list(inspect.signature(described.forward).parameters.values())[1:]
    if not isinstance(described.rules, str):
        known = {p.name for p in parameters}
        parameters += [
            p
            for p in inspect.signature(described.rules).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in known
        ]
    return str(inspect.Signature([bare(p) for p in parameters]))


def bare(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(annotation=inspect.Parameter.empty)


def rst_to_markdown(line: str) -> str:
    return line.replace("``", "`")


def rules(record: Operator, plans: list[Plan]) -> list[str]:
    """What its rules say of dims, of pending sums and of gradients."""
    lines = []
    seen: list[str] = []
    for plan in plans:
        written = rule_text(record, plan)
        if written not in seen and len(seen) < MOST_RULES:
            seen.append(written)
            lines.append(f"- `{written}`: {of_dims(plan.rule)}")
    lines.append(f"- pending sums {of_sums(record, plans)}")
    if record.backward is None:
        lines.append("- has no gradient")
    return lines


def rule_text(record: Operator, plan: Plan) -> str:
    if isinstance(record.rules, str):
        return record.rules
    made = record.rules(*[spec.shape for spec in plan.inputs], **plan.attributes)
    return made if isinstance(made, str) else made[0]


def of_dims(rule: Rule) -> str:
    """What becomes of each factor when it is split."""
    said: dict[str, str] = {}
    for dims in (*rule.operands, *rule.outputs):
        for dim in dims:
            for factor in dim:
                letter = "..." if factor.startswith(".") else factor
                said.setdefault(letter, of_factor(rule, factor))
    groups: dict[str, list[str]] = defaultdict(list)
    for letter, what in said.items():
        groups[what].append(f"`{letter}`")
    shown = [f"{what} {' '.join(letters)}" for what, letters in groups.items()]
    return ", ".join(shown) or "no dims"


def of_factor(rule: Rule, factor: str) -> str:
    # An inner factor of a composite dim, too, is whole.
    if not rule.shardable(factor, [1]):
        return "whole"
    if rule.kinds[factor] == COMBINE:
        return "reduced"
    if rule.kinds[factor] == MOVED:
        return "moved"
    kept = any(rule.has(dims, factor) for dims in rule.outputs)
    return "kept" if kept else "pending"


def of_sums(record: Operator, plans: list[Plan]) -> str:
    if record.additive:
        return "pass if all operands are pending"
    plan = plans[0]
    dtypes = [spec.dtype for spec in plan.inputs]
    linear = record.traits(dtypes, plan.attributes).linear
    by_dtype = "; it depends on the dtypes" if callable(record.linear) else ""
    if not linear:
        return f"are finished first{by_dtype}"
    if len(plan.inputs) == 1:
        return f"pass{by_dtype}"
    names = [f"operand {number}" for number in linear]
    return f"of {' or '.join(names)} pass{by_dtype}"


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"written: {PAGE}")

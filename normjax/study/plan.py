"""From a config to what will run: arms with their one property, blocks, hypotheses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from normjax.study.arms import PlannedArm, check_statements, resolve_arms
from normjax.study.cells import kinds
from normjax.study.designs import expand
from normjax.study.document import ConfigError, Document, parse_value, read_yaml
from normjax.study.experiment import Experiment, find
from normjax.study.schema import Study
from normjax.study.structure import form
from normjax.study.validation import canonical, validate

ENGINE = 2


@dataclass(frozen=True)
class Block:
    """The unit of work, storage and resume: one arm on consecutive seeds."""

    arm: str
    seeds: tuple[int, ...]
    id: str


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first cell runs.

    Attributes:
        study: the validated config.
        document: the config with places.
        experiment: the measure function and its schema.
        arms: by name, the baseline first.
        blocks: in the order in which they run.
        hypotheses_hash: SHA-256 of the declared hypotheses and outcomes.
        designs: which arms a decomposition, factorial, grid or tuning consists of.
    """

    study: Study
    document: Document
    experiment: Experiment
    arms: dict[str, PlannedArm]
    blocks: tuple[Block, ...]
    hypotheses_hash: str
    designs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def forms(self) -> dict[str, str]:
        """What arms share if one program serves them, by arm."""
        return {name: form(arm.cell.settings) for name, arm in self.arms.items()}

    @property
    def programs(self) -> int:
        """How many programs are compiled; an exact study is not compiled as a whole."""
        return 0 if self.study.seeds is None else len(set(self.forms.values()))

    def by_form(self, blocks: Iterable[Block]) -> list[Block]:
        """Blocks that share a program, one behind the other."""
        order = list(dict.fromkeys(self.forms.values()))
        return sorted(blocks, key=lambda block: order.index(self.forms[block.arm]))

    def shards(self, count: int) -> dict[str, int]:
        """Which of several shards computes a block.

        Parts differ by one block at most, and cut as few programs in two as they can.

        Args:
            count: of the shards.

        Returns:
            Numbers from 1 to ``count``, by the block's id.
        """
        ordered, total = self.by_form(self.blocks), len(self.blocks)
        return {block.id: i * count // total + 1 for i, block in enumerate(ordered)}


def make_plan(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    seeds: int | None = None,
    smoke: bool = False,
) -> Plan:
    """Read, validate and resolve a config.

    Args:
        path: the YAML file.
        overrides: ``settings.steps=400``: changes of the baseline, for all arms.
        seeds: in place of ``seeds.count``.
        smoke: the config's small form: its ``smoke:`` overrides, and at most 4 seeds.

    Returns:
        The ``Plan``.

    Raises:
        ConfigError: with ``file:line:column`` for the first thing that is wrong.
    """
    document = read_yaml(path)
    study: Study = validate(Study, document.data, document)
    if smoke:
        document = _apply_smoke(study, document)
    for number, text in enumerate(overrides, 1):
        document = _override(document, text, f"--set #{number}")
    study = validate(Study, document.data, document)
    if seeds is not None:
        if study.seeds is None:
            raise ConfigError("the study declares no seeds; leave it out", "--seeds")
        document = document.override("seeds.count", seeds, "--seeds")
        study = validate(Study, document.data, document)
    experiment = find(study.experiment, document, Path(path).parent)
    arms = resolve_arms(study, document, experiment)
    arms, designs = expand(study, document, experiment, arms)
    if experiment.seeded and study.seeds is None:
        text = f"is missing: {experiment.name} is random; add seeds: {{count: 10}}"
        raise document.error(("seeds",), text)
    check_statements(study, document, arms, _metrics(experiment, arms))
    declared = {
        "outcomes": canonical(study.outcomes),
        "hypotheses": [canonical(h) for h in study.hypotheses],
        **({"tune": canonical(study.tune)} if study.tune else {}),
    }
    return Plan(
        study,
        document,
        experiment,
        arms,
        tuple(_blocks(study, experiment, arms)),
        digest(declared),
        designs,
    )


def digest(value: Any) -> str:
    """SHA-256 of canonical JSON."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _metrics(experiment: Experiment, arms: Mapping[str, PlannedArm]):
    """What each arm measures, by tracing it: when somebody asks, and once."""

    @cache
    def measured(arm: str) -> dict[str, bool | None]:
        return kinds(experiment.measure, arms[arm].cell)

    return measured


def _apply_smoke(study: Study, document: Document) -> Document:
    """Overrides that make the study a matter of seconds."""
    if study.seeds is not None:
        count = min(4, study.seeds.count)
        for key in ("seeds.count", "seeds.block"):
            document = document.override(key, count, document.where(("seeds",)))
    for key, value in study.smoke.items():
        try:
            document = document.override(key, value, document.where(("smoke", key)))
        except KeyError as error:
            text = f"{error.args[0]} is no mapping, so {key} cannot be set"
            raise document.error(("smoke", key), text) from None
    return document


def _override(document: Document, text: str, origin: str) -> Document:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"got {text!r}, expected KEY=VALUE", origin)
    if key.split(".")[0] == "arms":
        text = "arms are not settable; --set changes the baseline for all arms"
        raise ConfigError(f"{key}: {text}", origin)
    try:
        return document.override(key, parse_value(value), origin)
    except KeyError as error:
        raise ConfigError(f"{key}: {error.args[0]} is no mapping", origin) from None
    except ConfigError as error:
        raise ConfigError(str(error), origin) from None


def _blocks(study: Study, experiment: Experiment, arms: Mapping[str, PlannedArm]):
    """Every arm on every block of seeds; without seeds one block of none."""
    seeds = study.seeds
    groups: list[tuple[int, ...]] = [()]
    if seeds is not None:
        every = range(seeds.first, seeds.first + seeds.count)
        size = seeds.block
        groups = [tuple(every[i : i + size]) for i in range(0, seeds.count, size)]
    for group in groups:
        for arm in arms.values():
            identity = {
                "engine": ENGINE,
                "experiment": [experiment.name, experiment.digest, experiment.data()],
                "settings": arm.cell.settings,
                "seeds": list(group),
            }
            yield Block(arm.name, group, digest(identity)[:16])


def resolved(plan: Plan, shards: int | None = None) -> dict[str, Any]:
    """The plan as plain data, for the run's JSON file and the report.

    Args:
        plan: the plan.
        shards: how many share the blocks, if several do.

    Returns:
        Plain data.
    """
    shard = {} if shards is None else plan.shards(shards)
    arms = {
        name: {
            "from": arm.parent,
            "role": arm.role,
            "confounded": arm.confounded,
            "changes": [
                {
                    "name": c.name,
                    "before": canonical(c.before),
                    "after": canonical(c.after),
                }
                for c in arm.changes
            ],
            "settings": canonical(arm.cell.settings),
        }
        for name, arm in plan.arms.items()
    }
    return {
        "study": plan.study.study,
        "question": plan.study.question,
        "experiment": plan.experiment.name,
        "engine": ENGINE,
        "seeds": canonical(plan.study.seeds),
        "outcomes": canonical(plan.study.outcomes),
        "hypotheses": [
            {**canonical(h), "sides": h.sides} for h in plan.study.hypotheses
        ],
        "hypotheses_hash": plan.hypotheses_hash,
        "labels": dict(plan.experiment.labels),
        "arms": arms,
        "designs": dict(plan.designs),
        "shards": shards,
        "blocks": [
            {
                "arm": b.arm,
                "seeds": list(b.seeds),
                "id": b.id,
                "shard": shard.get(b.id),
            }
            for b in plan.blocks
        ],
    }

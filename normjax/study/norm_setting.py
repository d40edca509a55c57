"""A normalization layer in the settings of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic import model_validator as _validator

from normjax.presets import PRESET_KEYS, PRESETS
from normjax.records import check_field, suggest
from normjax.spec import NormSpec
from normjax.study.schema import problem


class NormSetting(BaseModel):
    """A normalization layer in a model: a preset or pattern, a place, and fields.

    ``{preset: layer_norm, at: input, divide: rms}``; ``running: {decay: 0.9}`` and
    ``affine: null`` reach into the parts. Presets take their own ``groups``,
    ``ghosts``, ``axes``, ``channels`` and ``scale``.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    preset: str | None = None
    at: str = "input"
    _spec: NormSpec = PrivateAttr()

    @_validator(mode="after")
    def _build(self) -> NormSetting:
        fields = dict(self.model_extra or {})
        if (self.preset is None) == ("pattern" not in fields):
            raise problem("preset", "give a preset or a pattern, and not both")
        if self.preset is None:
            base = _try(
                "pattern",
                lambda: NormSpec.from_dict({"pattern": fields.pop("pattern")}),
            )
        else:
            preset = PRESETS.get(self.preset)
            if preset is None:
                hint = suggest(self.preset, list(PRESETS))
                raise problem("preset", f"there is no preset {self.preset!r}{hint}")
            own = {k: fields.pop(k) for k in PRESET_KEYS if k in fields}
            base = _try(next(iter(own), "preset"), lambda: preset(**own))
        for key, value in fields.items():
            base = _try(
                key, lambda base=base, key=key, value=value: _with(base, key, value)
            )
        self._spec = base
        return self

    @property
    def spec(self) -> NormSpec:
        """The declared layer."""
        return self._spec

    def with_spec(self, spec: NormSpec) -> NormSetting:
        """The same place with another layer, which may hold traced leaves."""
        other = self.model_copy()
        other._spec = spec
        return other


def _try(key: str, build) -> NormSpec:
    try:
        return build()
    except (ValueError, TypeError) as error:
        raise problem(key, str(error)) from None


def _with(spec: NormSpec, key: str, value: Any) -> NormSpec:
    """One field set; a mapping changes parts of a part that is there."""
    check_field(NormSpec, key)
    if isinstance(value, Mapping):
        if getattr(spec, key) is not None:
            value = {f"{key}.{inner}": v for inner, v in value.items()}
            spec = spec.replace(**value)
            return NormSpec.from_dict(spec.to_dict())
        return NormSpec.from_dict({**spec.to_dict(), key: value})
    value = tuple(value) if isinstance(value, list) else value
    return NormSpec.from_dict(spec.replace(**{key: value}).to_dict())

"""Independent chains (scheme II of Springenberg et al. 2016): nothing is exchanged.

Each chain samples the law of its dynamics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

from hookean.coupling.base import Coupling


@dataclasses.dataclass(frozen=True)
class Independent(Coupling):
    """No coupling."""

    law: ClassVar[str] = "each chain on its own: the law of the dynamics"

    @classmethod
    def variants(cls) -> Sequence[Self]:
        """There is one."""
        return [cls()]

"""Settings that may differ between groups of parameters."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.optim.parameters import Setting
from mergekit_lab.ranges import check_settings


class GroupSettings(Optimizer):
    """An optimizer whose groups may have for themselves what `group_settings` names and the base has not."""

    base: Optimizer
    saved_attributes: ClassVar[tuple[str, ...]] = ()
    group_settings: ClassVar[tuple[str, ...]] = ()

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def names(self) -> dict[Tensor, str]:
        """The name of each parameter; empty without names."""
        return {
            p: name
            for group in self.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def refuse_group_settings(self) -> None:
        """Raise `InputError` if a group sets what must be the same for all parameters."""
        common = {*self.saved_attributes} - {*self.group_settings} - self.base.defaults.keys()
        for number, group in enumerate(self.param_groups):
            if odd := common & group.keys():
                name, may = type(self).__name__, join_names(self.group_settings) or "none of its own"
                raise InputError(
                    f"parameter group {number} sets {join_names(odd)}, which {name} takes once for all "
                    f"groups (a group may set {may}): pass it to {name} itself"
                )

    def list_values(self, name: str) -> list[Any]:
        """A setting's value in each group: the group's, or else this optimizer's."""
        common: Any = getattr(self, name)
        if name in self.base.defaults or name not in self.group_settings:
            return [common for _ in self.param_groups]
        return [group.get(name, common) for group in self.param_groups]

    def check_ranges(self) -> None:
        """Raise `InputError` unless settings are as the constructors' arguments say, in every group too."""
        makers = [vars(kind)["__init__"] for kind in type(self).__mro__ if "__init__" in vars(kind)]
        own = vars(self) | {name: getattr(self, name) for name in self.saved_attributes}
        free = [name for name in self.group_settings if name not in self.base.defaults]
        for maker in makers:
            check_settings(maker, own)
            for number, group in enumerate(self.param_groups):
                in_group = {name: group[name] for name in free if name in group}
                check_settings(maker, in_group, f"{{}} of group {number}")

    def read_setting(self, name: str, params: Sequence[Tensor], *, signed: bool = False) -> Setting:
        """A setting of `params`: one number, or a list with one per parameter if groups differ.

        Args:
            name: the attribute's name.
            params: parameters whose setting is read.
            signed: negate it if the base maximizes the loss, so that an ascent becomes a descent.
        """
        values = self.list_values(name)
        if signed:
            groups = zip(self.param_groups, values, strict=True)
            values = [-value if group.get("maximize") else value for group, value in groups]
        if all(value == values[0] for value in values):
            return values[0]
        groups = zip(self.param_groups, values, strict=True)
        by_parameter = {p: value for group, value in groups for p in group["params"]}
        return [by_parameter[p] for p in params]

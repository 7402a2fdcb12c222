"""The range of a numeric flag stands beside the flag, as its type. A number outside it is refused at the start.

    steps: PositiveInt = 200                                 pydantic has the common ranges
    rate: Annotated[float, Field(ge=0, lt=0.5)] = 0.1        any other interval

A float without a range, as a fork may add one, only has to be finite. tyro ignores these bounds: --help shows INT and
FLOAT, and check() refuses the number in one line.
"""

import dataclasses
from typing import Annotated, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from common.errors import BadInput


def not_below_one(cap: float) -> float:
    """A weight of exp(old - rollout) is 1 up to rounding, so a cap below 1 would shrink every loss."""
    if 0 < cap < 1:
        raise PydanticCustomError("weight_cap", "0 to turn it off, or 1 or more")
    return cap


Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
LearningRate = Annotated[float, Field(ge=0, lt=1)]  # 2 in place of 2e-6 is a slip
Temperature = Annotated[float, Field(ge=0.01)]  # vLLM samples at 0.01 where less is asked
WeightCap = Annotated[float, Field(ge=0), AfterValidator(not_below_one)]
Seed = Annotated[int, Field(ge=0, le=10**9)]  # the engine's seeds are seed x 2^20 + step, in 64 bits

FINITE = ConfigDict(allow_inf_nan=False)


def check(args) -> None:
    """Refuse the first flag whose value is outside its range. args: a dataclass, perhaps of dataclasses.

    Raises BadInput.
    """
    types = get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        # Groups of flags, such as --source, are dataclasses of their own.
        if dataclasses.is_dataclass(value):
            check(value)
            continue
        try:
            TypeAdapter(types[field.name], config=FINITE).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]  # For a flag with two numbers it names the one that is outside.
            bound = first["msg"].removeprefix("Input should be ")
            raise BadInput(f"--{field.name.replace('_', '-')} {first['input']}: must be {bound}") from None

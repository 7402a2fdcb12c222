"""Checks the reply of a reward service, or a file of weights, by a pydantic model. A fault becomes one line."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Form = TypeVar("Form", bound=BaseModel)


def parse_as(form: type[Form], value: Any) -> Form:
    """The value as a `form`. Raises ValueError with the first wrong field, its value, and what is expected."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f'"{field}" is {first["input"]!r:.50}: {first["msg"]}') from None

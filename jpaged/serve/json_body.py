"""Body: the JSON object of a request, of known fields and checked types."""

import codecs
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from jpaged.serve.errors import from_validation
from jpaged.serve.unsupported import refuse_unsupported


def whole(value: object) -> object:
    """2.0 as 2; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
"""An integer. JSON has one kind of number: 2.0 is 2."""


class Body(BaseModel):
    """A JSON object of known fields; null means left out."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    neutral: ClassVar[Mapping[str, tuple]] = {}

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises a 400 in one line: malformed JSON, invalid UTF-8, a wrong type, an unknown or unsupported field."""
        try:
            parsed = cls.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
        except ValidationError as error:
            raise from_validation(error) from None
        refuse_unsupported(parsed.model_extra, cls.neutral)
        parsed.check()
        return parsed

    def check(self) -> None:
        """What pydantic's types cannot say. Raises a 400."""

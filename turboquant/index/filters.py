"""Filters of documents: their grammar, and the function of a document that a filter stands for.

    {"field": "meta.year", "operator": ">=", "value": 1990}
    {"operator": "AND", "conditions": [filter, ..]}     also "OR", and "NOT": not all of them hold

A field is "id", "content" or a name in the metadata, with or without "meta." in front; dots lead into mappings. The
value of a missing field is None. Operators, where x is the document's value:

    == !=                   equal; None too
    > >= < <=               compare two numbers, or two dates in ISO 8601; nothing else matches, nor does None
    in, not in              x is in a list
    contains                x is a list with the value in it
    any, all                x is a list with any or all of the listed values in it
    text_match              the text is in x; text_match_insensitive ignores case
    is_empty                x is None, "" or []; the value does not matter
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import datetime
from typing import Any

__all__ = ["equal_to", "is_filter", "matching"]

Test = Callable[[Any], bool]  # takes a document, or a value of one


def matching(filter: Any) -> Test:
    """Returns a function that says whether a document (`documents.Document`) matches. Raises ValueError or TypeError
    at once for what is no filter."""
    if not isinstance(filter, dict):
        raise TypeError(f"`filter` must be a dict, got {filter!r:.80}")
    if "field" not in filter:
        return _all_or_any(filter)
    for key in ("operator", "value"):
        if key not in filter:
            raise ValueError(f"`filter` must have '{key}' beside 'field', got {filter!r:.200}")
    field, name = filter["field"], filter["operator"]
    if not isinstance(field, str):
        raise TypeError(f"`filter`: 'field' must be a str, got {field!r:.80}")
    if not isinstance(name, str) or name not in _OPERATORS:
        raise ValueError(f"`filter`: 'operator' must be one of {', '.join(_OPERATORS)}, got {name!r:.80}")
    test = _OPERATORS[name](filter["value"])
    if field in ("id", "content"):
        return lambda document: test(document.id if field == "id" else document.text)
    path = field.removeprefix("meta.")
    return lambda document: test(_value(document.metadata, path))


def is_filter(values: dict[str, Any]) -> bool:
    """Whether a dict is a filter of this grammar, right or not, rather than metadata: those may have such names too."""
    return "operator" in values and ("field" in values or "conditions" in values)


def equal_to(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the filter for documents whose metadata have these values."""
    conditions = [{"field": f"meta.{key}", "operator": "==", "value": value} for key, value in values.items()]
    return {"operator": "AND", "conditions": conditions}


def _all_or_any(filter: dict[str, Any]) -> Test:
    name, conditions = filter.get("operator"), filter.get("conditions")
    if name not in ("AND", "OR", "NOT"):
        raise ValueError(f"`filter` must have a 'field', or AND, OR or NOT as 'operator', got {filter!r:.200}")
    if not isinstance(conditions, list):
        raise ValueError(f"`filter` must have a list of 'conditions' beside {name}, got {conditions!r:.200}")
    tests = [matching(condition) for condition in conditions]
    if name == "OR":
        return lambda document: any(test(document) for test in tests)
    return lambda document: all(test(document) for test in tests) != (name == "NOT")


def _value(metadata: Any, path: str) -> Any:
    """Returns the value under `path` as one name, dots included, or under the names between its dots."""
    if not isinstance(metadata, dict):
        return None
    if path in metadata or "." not in path:
        return metadata.get(path)
    first, _, rest = path.partition(".")
    return _value(metadata.get(first), rest)


def _date(value: Any) -> datetime | None:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    return value if isinstance(value, datetime) else None


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any], Test]:
    def test_for(value: Any) -> Test:
        if value is None:
            return lambda x: False
        if isinstance(value, int | float):
            return lambda x: isinstance(x, int | float) and compare(x, value)
        limit = _date(value)
        if limit is None:
            raise ValueError(
                f"`filter`: 'value' of > >= < <= must be a number or a date in ISO 8601, got {value!r:.80}"
            )

        def test(x: Any) -> bool:
            date, bound = _date(x), limit
            if date is None:
                return False
            if date.tzinfo is None:  # a date without a time zone is in that of the other
                date = date.replace(tzinfo=bound.tzinfo)
            elif bound.tzinfo is None:
                bound = bound.replace(tzinfo=date.tzinfo)
            return compare(date, bound)

        return test

    return test_for


def _needs(kind: type, test: Callable[[Any, Any], bool]) -> Callable[[Any], Test]:
    def test_for(value: Any) -> Test:
        if not isinstance(value, kind):
            raise TypeError(f"`filter`: 'value' must be a {kind.__name__} here, got {value!r:.80}")
        return lambda x: test(x, value)

    return test_for


def _with_any(test: Callable[[Any, Any], bool]) -> Callable[[Any], Test]:
    return lambda value: lambda x: test(x, value)


_OPERATORS: dict[Any, Callable[[Any], Test]] = {
    "==": _with_any(lambda x, value: bool(x == value)),
    "!=": _with_any(lambda x, value: bool(x != value)),
    ">": _ordered(operator.gt),
    ">=": _ordered(operator.ge),
    "<": _ordered(operator.lt),
    "<=": _ordered(operator.le),
    "in": _needs(list, lambda x, values: x in values),
    "not in": _needs(list, lambda x, values: x not in values),
    "contains": _with_any(lambda x, value: isinstance(x, list) and value in x),
    "any": _needs(list, lambda x, values: isinstance(x, list) and any(value in x for value in values)),
    "all": _needs(list, lambda x, values: isinstance(x, list) and all(value in x for value in values)),
    "text_match": _needs(str, lambda x, text: isinstance(x, str) and text in x),
    "text_match_insensitive": _needs(str, lambda x, text: isinstance(x, str) and text.lower() in x.lower()),
    "is_empty": _with_any(lambda x, value: x is None or x == "" or x == []),
}

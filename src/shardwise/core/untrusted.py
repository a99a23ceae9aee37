"""Bounds on text of untrusted origin that is slow by design: regular expressions, and YAML with aliases."""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import yaml

from shardwise.core.errors import ConfigError

_PLAIN: Final = re.compile(r"(?:[\w.-]|\\\W)*")
"""Patterns without repetition or choice, which take no longer than their length."""

_MATCHING_S: Final = 2
"""Seconds of a processor: a millisecond suffices for a pattern that is meant for the names of a model."""

_MATCH: Final = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, 2 * (int(sys.argv[1]),))
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    print(json.dumps(pattern), flush=True)
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        continue
    for name in names:
        compiled.fullmatch(name)
"""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression ``regex`` that a library makes of the text of an option."""

    option: str
    text: str
    regex: str


def require_quick_patterns(patterns: Iterable[Pattern], names: Collection[str]) -> None:
    """Check that regular expressions can be matched with all names in a bounded time.

    ``re`` tries every way to match, cannot be interrupted, and lets no other thread run, not even the one with this
    rank's heartbeats. So it runs in a process of its own first, with a limit. Invalid patterns are ignored.

    Raises:
        ConfigError: it takes longer. The message has the pattern.
    """
    # Text without repetition is not worth a process.
    slow = {pattern.regex: pattern for pattern in patterns if not _PLAIN.fullmatch(pattern.text)}
    if not slow:
        return
    command = [sys.executable, "-I", "-S", "-c", _MATCH, str(_MATCHING_S)]
    content = json.dumps([[*slow], [*names]])
    process = subprocess.run(command, input=content, capture_output=True, encoding="ascii", check=False)
    if not process.stdout:
        process.check_returncode()
    if process.returncode:
        last = slow[json.loads(process.stdout.splitlines()[-1])]
        raise ConfigError(
            f"{last.option}={last.text!r:.200}: takes more than {_MATCHING_S} seconds to match with {len(names):,} "
            "names, as repetitions in repetitions do. Write a simpler pattern, or list the names"
        )


_MAX_VALUES: Final = 100_000


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if abs(value) > sys.float_info.max:  # conversions of it fail, even to text for a message
            raise ValueError("it has a number of more than 300 digits. Write a smaller one")
        return value

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # Before ``<<`` is replaced by the keys that it merges, which others of the mapping may override.
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in keys:
                    line = key.start_mark.line + 1
                    raise ValueError(f"{key.value} is there twice, again in line {line}. Remove one of them")
                keys.add((key.tag, key.value))
        return node


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str) -> object:
    """Return the value of a YAML document.

    Raises:
        yaml.YAMLError, ValueError, RecursionError: it is not valid, has a key twice, of which YAML would take the
            last, or its aliases expand to more than 100,000 values: a few lines can expand to more than fits into
            any memory.
    """
    loader = _Loader(text)
    try:
        # The nodes first, of which an alias is one however often it is used. Values may be far more.
        document = loader.get_single_node()
        if document is None:
            return None
        if "*" in text and _count_expanded(document, {}) > _MAX_VALUES:
            raise ValueError(f"its aliases expand to more than {_MAX_VALUES:,} values. Write the values out")
        value: object = loader.construct_document(document)
        return value
    except (AttributeError, LookupError, OverflowError) as error:  # of PyYAML, for !!int "" or !!bool x
        raise ValueError(f"a value does not have the type of its tag ({error!r}). Remove the tag") from error
    finally:
        loader.dispose()


def _count_expanded(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values in a node, those of an alias counted wherever it stands.

    ``counts`` are those of other nodes by ``id``. A node that contains itself has too many.
    """
    if id(node) not in counts:
        counts[id(node)] = _MAX_VALUES + 1
        inner = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            inner = chain.from_iterable(node.value)
        counts[id(node)] = 1 + sum(_count_expanded(child, counts) for child in inner)
    return counts[id(node)]

"""Constructors that vLLM's factory takes, and those that it refuses.

The factory asks `supports_kw(class, "kv_cache_config")` and calls the class with three arguments
(vllm/distributed/kv_transfer/kv_connector/factory.py). Each class is `Nothing` but for its constructor.
"""

from __future__ import annotations

import functools
from typing import Any

from tests.wrong_connectors.interface.halves import Nothing

# ---- taken ------------------------------------------------------------------------------------------------


class PassesAllOn(Nothing):
    """It takes whatever comes, and hands it to the base class."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class HasADefault(Nothing):
    """The third argument may be left out."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None):
        super().__init__(vllm_config, role, kv_cache_config)


class ByPlaceAlone(Nothing):
    """The three arguments have no keywords."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any, /):
        super().__init__(vllm_config, role, kv_cache_config)


class HasNone(Nothing):
    """The constructor is that of the base class."""


class IsMadeByNew(Nothing):
    """It has __new__, which takes whatever comes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> IsMadeByNew:
        return super().__new__(cls)


def _logged(init: Any) -> Any:
    def logged(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    return logged


class IsDecorated(Nothing):
    """The decorator hides the names of the arguments."""

    @_logged
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)


def _timed(init: Any) -> Any:
    return functools.wraps(init)(_logged(init))


class IsDecoratedWell(Nothing):
    """The decorator shows the names of the arguments."""

    @_timed
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)


# ---- refused ----------------------------------------------------------------------------------------------


class TakesTwo(Nothing):
    """The constructor of earlier versions of vLLM."""

    def __init__(self, vllm_config: Any, role: Any):
        super().__init__(vllm_config, role, None)


class TakesNoKeyword(Nothing):
    """vLLM's supports_kw asks for the keyword, and *args has none."""

    def __init__(self, *args: Any):
        super().__init__(*args)


class ByKeywordAlone(Nothing):
    """supports_kw lets it pass, and the factory passes the third argument by its place."""

    def __init__(self, vllm_config: Any, role: Any, *, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)


class TakesMoreKeywords(Nothing):
    """As ByKeywordAlone, with a keyword that has no name."""

    def __init__(self, vllm_config: Any, role: Any, **kwargs: Any):
        super().__init__(vllm_config, role, **kwargs)


class TakesFour(Nothing):
    """The factory has no fourth argument."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any, metrics: Any):
        super().__init__(vllm_config, role, kv_cache_config)

"""Every error that Anaphora raises on purpose. Knows nothing of the rest.

AnaphoraError
├── ConfigError                  an engine option is wrong or contradicts another
├── RequestError                 one request is wrong; the engine and other requests go on
│   ├── EmptyPromptError
│   ├── InvalidTokenError        a token id is no integer or outside the vocabulary
│   ├── InvalidParameterError    a sampling parameter, salt, message or priority is wrong
│   ├── PromptTooLongError       can never fit: context limit or block pool
│   ├── DuplicateRequestError
│   ├── UnknownRequestError
│   ├── UnknownAdapterError      no adapter of this name is loaded
│   └── AdapterLimitError        every adapter in memory is in use, and there is no room for another
├── ModelError                   a model cannot be used
│   ├── UnknownModelError        neither a folder, a file, a built-in name nor a reachable hub id
│   ├── ModelFileError           the files are there and are broken or incomplete
│   ├── ChecksumError            a fetched file is not the one expected
│   ├── FetchError               the registry or hub cannot be reached or refuses
│   ├── DiskSpaceError           not enough room to fetch or convert
│   ├── UnsupportedModelError    the architecture needs something that this engine lacks
│   └── WeightsError             new weights do not fit the model, or may not come now
├── AdapterError                 a LoRA adapter cannot be used
│   ├── AdapterFileError         its files are missing, broken or made for another model
│   ├── UnsupportedAdapterError  it needs something that this engine lacks
│   ├── AdapterChangedError      its files are not those that it was loaded from
│   └── DuplicateAdapterError    an adapter of this name is loaded
├── TraceError                   a trace file cannot be read or has a broken line
├── BenchError                   a target of a benchmark is gone, or its journal cannot be used
├── ServerUnreachableError       a server does not answer, or not as one of ours
├── StepFailedError              the model failed while it computed this request
├── EngineBusyError              another call of this engine is running
└── EngineStoppedError           the engine has ended: nothing is served any more
"""

from __future__ import annotations


class AnaphoraError(Exception):
    """Base of every error raised on purpose. The message says what is wrong and what to do."""


class ConfigError(AnaphoraError, ValueError):
    """An engine option is wrong or contradicts another one."""


class RequestError(AnaphoraError, ValueError):
    """One request is wrong. Nothing of it is kept; the engine serves on."""


class EmptyPromptError(RequestError):
    """The prompt has no tokens."""


class InvalidTokenError(RequestError):
    """A token id is not an integer or lies outside the vocabulary."""


class InvalidParameterError(RequestError):
    """A sampling parameter, salt, message or priority is wrong."""


class PromptTooLongError(RequestError):
    """The prompt can never fit: it exceeds the context limit or the whole block pool."""


class DuplicateRequestError(RequestError):
    """A request with this id is alive already."""


class UnknownRequestError(RequestError):
    """No live request has this id."""


class UnknownAdapterError(RequestError):
    """No adapter of this name is loaded."""


class AdapterLimitError(RequestError):
    """Every adapter in memory is in use by requests, and there is no room for another one now."""


class ModelError(AnaphoraError):
    """A model cannot be used."""


class UnknownModelError(ModelError):
    """The name is neither a folder, a file, a built-in name nor a reachable hub id."""


class ModelFileError(ModelError):
    """The model's files are broken or incomplete."""


class ChecksumError(ModelError):
    """A fetched file is not the one that was expected."""


class FetchError(ModelError):
    """The registry or hub cannot be reached, or refuses."""


class DiskSpaceError(ModelError):
    """There is not enough room to fetch or convert the model."""


class UnsupportedModelError(ModelError):
    """The architecture needs something that this engine lacks."""


class WeightsError(ModelError):
    """New weights do not fit the model, or may not come while requests run. The old ones stay as they are."""


class AdapterError(AnaphoraError):
    """A LoRA adapter cannot be used. What was loaded before stays as it is."""


class AdapterFileError(AdapterError):
    """The adapter's files are missing, broken or made for another model."""


class UnsupportedAdapterError(AdapterError):
    """The adapter needs something that this engine lacks."""


class AdapterChangedError(AdapterError):
    """The files of an adapter that was to be read again are not those that it was loaded from."""


class DuplicateAdapterError(AdapterError):
    """An adapter of this name is loaded, and replacing it was not asked for."""


class TraceError(AnaphoraError, ValueError):
    """A trace file cannot be read, or a line of it is broken."""


class BenchError(AnaphoraError):
    """A target of a benchmark cannot be reached or answers nonsense, or the benchmark's journal cannot be used."""


class ServerUnreachableError(AnaphoraError):
    """A server does not answer, or what it answers is not what Anaphora's server says."""


class StepFailedError(AnaphoraError):
    """The model failed (exception or non-finite output) while it computed this request."""


class EngineBusyError(AnaphoraError):
    """Another call of this engine is running, in another thread or further up in this one."""


class EngineStoppedError(AnaphoraError):
    """The engine has ended, on request, by a crash of its thread or in its bookkeeping: nothing is served any more."""

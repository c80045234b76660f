"""Every error a user of kernelgen can meet.

Each message says what was got, what was expected and what to do. The input errors are ``ValueError`` so that code
written against torch conventions catches them without importing this module.
"""

from __future__ import annotations


class KernelgenError(Exception):
    """Base of the errors that are about kernels, builds and the cache rather than about one argument."""


class ShapeError(ValueError):
    """A tensor's rank, size or head count does not fit the call."""


class DtypeError(ValueError):
    """A tensor's dtype is not accepted here, or two tensors that must agree do not."""


class DeviceError(ValueError):
    """Tensors of one call live on different devices, or the device cannot run what was asked."""


class LayoutError(ValueError):
    """A stride or alignment that the call cannot take (the last dimension must be contiguous)."""


class SettingsError(ValueError):
    """An environment variable or an option of a call holds an illegal value; the message lists the legal ones."""


class NoBackendError(KernelgenError):
    """No backend can run the problem; the message carries the table of reasons."""


class UnknownBackendError(NoBackendError, ValueError):
    """A backend's name is none; the message lists them. A ValueError, as every illegal argument is."""


class BackendError(KernelgenError):
    """A backend that the caller named failed in a call that it was expected to run.

    The library's own error is the cause. Attributes: ``backend``, its name.
    """

    def __init__(self, message: str, *, backend: str = "") -> None:
        super().__init__(message)
        self.backend = backend


class CompileError(KernelgenError):
    """A compiler refused a rendered kernel.

    Attributes: ``command`` (what was run), ``output`` (the compiler's own text), ``source`` (path of the kept
    source, or None).
    """

    def __init__(self, message: str, *, command: str = "", output: str = "", source: str | None = None) -> None:
        super().__init__(message)
        self.command = command
        self.output = output
        self.source = source


class ToolchainMissing(KernelgenError):
    """A compiler or one of its libraries was not found; the message lists what was searched."""


class ArtifactMissingError(KernelgenError):
    """Compiling is switched off (``KERNELGEN_JIT=0``) and no prebuilt artifact of the spec fits.

    Attributes: ``spec`` (name of the kernel), ``target``, ``command`` (what builds it, on any machine with a compiler).
    """

    def __init__(self, message: str, *, spec: str = "", target: str = "", command: str = "") -> None:
        super().__init__(message if not command else f"{message}\n  to build it, on any machine with a compiler:\n    {command}\n"
                         "  then `kernelgen cache export bundle.tar` there and `kernelgen cache import bundle.tar` here. All kernels of a "
                         "service: kernelgen prebuild --model or --manifest")
        self.spec = spec
        self.target = target
        self.command = command
        self.message = message

    def with_command(self, command: str) -> ArtifactMissingError:
        """The same, naming what builds the kernel."""
        return ArtifactMissingError(self.message, spec=self.spec, target=self.target, command=command)


class CacheError(KernelgenError):
    """The cache folder cannot be used, or an entry could not be published."""


class VariantError(KernelgenError, ValueError):
    """A variant's Python function cannot become kernel code; the message says which operation, and what to write instead."""


class LaunchError(KernelgenError):
    """The driver refused to load or launch a kernel."""

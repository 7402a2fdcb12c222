"""Stands for SGLang's CPU kernels, which have no package for every processor. SGLang imports names from it when it
starts; on a CPU, its attention of plain torch calls none of them.
"""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: SGLang's CPU kernels are not installed")

    missing.__name__ = name
    return missing

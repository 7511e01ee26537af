"""How gpu_pool is packaged. Tools are set up in pyproject.toml, development versions pinned in requirements/."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The package's version, read and not imported: its dependencies need not be there when it is built."""
    text = (HERE / "hydra_plugins/hydra_gpu_pool_launcher/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("hydra_plugins/hydra_gpu_pool_launcher/__init__.py has no line '__version__ = …'")
    return found[1]


setup(
    name="hydra-gpu-pool-launcher",
    version=version(),
    description="A Hydra launcher that runs a sweep's jobs side by side on the GPUs of this machine",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the gpu_pool authors",
    license="MIT",
    keywords=["hydra", "launcher", "sweep", "multirun", "gpu", "cuda", "hyperparameter", "pytorch", "ddp", "torchrun"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    # hydra_plugins is a namespace that Hydra's plugins share: it has no __init__.py, here or anywhere. It is listed,
    # and package_dir said although it is the default, for editable installs: only so are they a plain path in a .pth
    # file, which Hydra's plugin scan sees, and not an import hook, which it misses.
    packages=find_namespace_packages(include=["hydra_plugins", "hydra_plugins.*"]),
    package_dir={"": "."},
    package_data={"hydra_plugins.hydra_gpu_pool_launcher": ["page.css", "page.js", "py.typed"]},
    include_package_data=False,
    entry_points={"console_scripts": ["gpu-pool = hydra_plugins.hydra_gpu_pool_launcher._cli:main"]},
    python_requires=">=3.10",
    install_requires=[
        "cloudpickle",
        "hydra-core>=1.3",  # Hydra 1.4's release candidates too, for those who ask pip for them
        "rich",  # how wide text is in a terminal
        "threadpoolctl",
    ],
    extras_require={
        "ddp": ["torch>=2.5"],
        "gpu": ["nvidia-ml-py"],
        "ray": ["hydra-ray-launcher>=1.2"],  # to compare with
        "example": ["scikit-learn", "torch"],
        "title": ["setproctitle"],  # jobs' names in nvidia-smi, htop and ps
        "browser": ["playwright"],  # to look at sweep.html, in a chromium that is there already
        # What jobs are tested with where torch is there.
        "clients": ["accelerate", "intel-openmp; platform_machine == 'x86_64'", "lightning"],
        "dev": [
            "build",
            "hydra-optuna-sweeper",
            "hydra-zen",
            "hypothesis",
            "mypy",
            "nvidia-ml-py",
            "pyte",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setproctitle",
            "setuptools>=77",
            "tox",
        ],
    },
)

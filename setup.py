"""Packaging. The native sources of ``cuda_ops`` travel with the package and are compiled at first use."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="monetrun",
    version="0.1.0",
    description="Train an unmodified PyTorch script under a memory budget",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    keywords=["PyTorch", "memory", "rematerialization", "gradient checkpointing"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=[*find_packages(include=["monetrun", "monetrun.*"]), "monetrun.cuda_ops"],
    package_dir={"monetrun": "monetrun", "monetrun.cuda_ops": "cuda_ops"},
    package_data={
        "monetrun": ["py.typed"],
        "monetrun.launcher": ["*.html"],
        "monetrun.cuda_ops": ["*.cpp", "*.hpp", "*.cu", "*.cuh"],
    },
    install_requires=[
        "torch>=2.11",
        "torchvision",
        "click>=8.1",
        "cvxpy>=1.6",
        "pyscipopt>=5.5",
        "highspy>=1.8",
        "nvidia-ml-py>=12.560",
        "psutil>=5.9",
        "rich>=13",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.8",
            "hypothesis>=6.100",
            "scikit-learn>=1.4",
            "ruff>=0.11",
            "mypy>=1.15",
            "import-linter>=2.1",
            "matplotlib>=3.8",
            "build>=1.2",
        ],
        "docs": ["mkdocs-material>=9.5"],
        "cudnn": ["nvidia-cudnn-frontend>=1.18"],
        "report": ["matplotlib>=3.8", "tensorboard>=2.17"],
        "recipes": ["scikit-learn>=1.4"],
        # the trainers of scripts in tests/commands/test_real_scripts.py and of three recipes
        "real": [
            "transformers>=5",
            "accelerate>=1.10",
            "lightning>=2.6",
            "timm>=1.0.20",
            "peft>=0.18",
        ],
    },
    entry_points={
        "console_scripts": ["monetrun = monetrun.commands.main:console"],
        # torch calls it at the end of `import torch`; without monetrun's variables it returns at once
        "torch.backends": ["monetrun = monetrun.runtime.autoload:autoload"],
    },
)

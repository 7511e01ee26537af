"""``python -m hydra_plugins.hydra_gpu_pool_launcher``: the command ``gpu-pool``, where the script is not on the PATH.

Hydra's scan for plugins imports this module in every app, since its name begins with two underscores: it runs nothing
then, and imports nothing.
"""


def _main() -> None:
    from ._cli import main

    main()


if __name__ == "__main__":
    _main()

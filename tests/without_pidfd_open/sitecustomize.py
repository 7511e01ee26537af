"""With this directory on PYTHONPATH, each interpreter that starts is as one that was built without os.pidfd_open.

Conda's are, and older standalone builds, although the kernel has the call. Python imports this module by itself, before
the program, in subprocesses too.
"""

import os

if hasattr(os, "pidfd_open"):
    del os.pidfd_open

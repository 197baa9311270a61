"""What a load of any table does last, each as code that kills it there."""

PUBLISHING = {
    "hashing": "import tableside.loader.segment.writer as s, os; s.checksum = lambda *a: "
    "os.kill(os.getpid(), 9)",
    "sealing": "import os; os.fchmod = lambda *a: os.kill(os.getpid(), 9)",
    "recording": "import os; os.pwrite = lambda *a: os.kill(os.getpid(), 9)",
    "renaming": "import os; os.rename = lambda *a, **k: os.kill(os.getpid(), 9)",
    "flipping": "import tableside.loader.versions.versions as v, os; v.flip = lambda *a: "
    "os.kill(os.getpid(), 9)",
}

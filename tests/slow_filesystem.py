"""A FUSE file system that shows a directory and takes its time for each write: slow_filesystem.py SOURCE MOUNT SECONDS.

It runs by the system's Python, which has Debian's python3-fusepy.
"""

import os
import sys
import time

import fusepy  # pyright: ignore[reportMissingImports]  # not of this environment


class Slow(fusepy.Operations):  # pyright: ignore[reportUntypedBaseClass]
    def __init__(self, source: str, seconds: float) -> None:
        self.source, self.seconds = source, seconds

    def _at(self, path: str) -> str:
        return self.source + path

    def getattr(self, path: str, fh: object = None) -> dict:
        stat_result = os.lstat(self._at(path))
        names = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_mtime", "st_atime", "st_ctime")
        return {name: getattr(stat_result, name) for name in names}

    def readdir(self, path: str, fh: object) -> list:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict:
        statvfs_result = os.statvfs(self._at(path))
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_ffree", "f_frsize", "f_namemax")
        return {name: getattr(statvfs_result, name) for name in names}

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def utimens(self, path: str, times: object = None) -> None:
        os.utime(self._at(path), times)  # pyright: ignore[reportArgumentType]

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        time.sleep(self.seconds)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: object = None) -> None:
        os.truncate(self._at(path), length)

    def fsync(self, path: str, datasync: bool, fh: int) -> None:
        time.sleep(self.seconds)
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


if __name__ == "__main__":
    source, mount, seconds = sys.argv[1:]
    fusepy.FUSE(Slow(source, float(seconds)), mount, foreground=True, nothreads=False)

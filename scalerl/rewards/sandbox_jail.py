"""Program that the sandbox starts: makes namespaces, runs the untrusted program in them, and reports how it ended.

Runs alone, as `python -I -S sandbox_jail.py SETTINGS`: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER = 0x10000000
# Namespaces of mounts, host name, IPC, processes and network.
CLONE_OTHERS = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
# mount_setattr has the same number on all architectures; the older pivot_root does not.
SYS_MOUNT_SETATTR = 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203}
NOBODY = 65534
BOX = "/box"
SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
# Candidates for the new root, any directory that exists; it is covered only inside the mount namespace.
MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/tmp")


def main() -> None:
    settings = json.loads(sys.argv[1])
    report: dict[str, Any]
    try:
        report = {"code": _run(settings)}
    except Exception as error:
        report = {"setup": f"{type(error).__name__}: {error}"}
    os.write(settings["status_fd"], json.dumps(report).encode())


def _run(settings: dict[str, Any]) -> int:
    """Runs the program; returns its exit code, -N for signal N.  Raises OSError when the sandbox cannot be made."""
    source = _read_exactly(0, settings["source_bytes"])
    is_root = os.geteuid() == 0
    if not is_root:
        _enter_user_namespace()
    _checked(LIBC.unshare(CLONE_OTHERS), "new mount, host name, IPC, process and network namespaces")
    if settings["socket_fd"] is not None:
        _send_listener(settings["socket_fd"], settings["port"])
    # Die with the thread that waits for this process; the timer covers the case that it died before this line.
    _checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with the parent")
    signal.setitimer(signal.ITIMER_REAL, settings["wall_s"] + 5)
    error_read, error_write = os.pipe()  # closed by exec, so what can be read from it is a failed setup
    child = os.fork()
    if child == 0:
        try:
            _become_program(settings, source, is_root, keep_fd=error_write)
        except BaseException as error:
            os.write(error_write, str(error).encode() or b"unknown error")
        os._exit(1)
    os.close(error_write)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)  # so that the reader sees the pipes end when the program ends
    failed = os.read(error_read, 4096)
    _, status = os.waitpid(child, 0)
    if failed:
        raise OSError(failed.decode(errors="replace"))
    return os.waitstatus_to_exitcode(status)


def _become_program(settings: dict[str, Any], source: bytes, is_root: bool, keep_fd: int) -> None:
    """Turns this process, process 1 of the namespaces, into the program; returns only by raising OSError."""
    _new_root(settings)
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # Its processes are then counted in this namespace, not with all others of user nobody. If that fails they are
        # counted together: the limit still holds, but programs share it.
        LIBC.unshare(CLONE_NEWUSER)
    os.chdir(BOX)
    path = f"{BOX}/program.py"
    if not settings["command"]:
        with open(path, "wb") as file:
            file.write(source)
    _set_limits(settings)
    _checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    # Set after the last change of user, which would clear it.
    _checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with the parent")
    os.closerange(3, keep_fd)
    os.closerange(keep_fd + 1, 1 << 16)
    # The parent has the only other end of this pipe. If it died before the line above, nothing else ends this process.
    if _has_no_reader(keep_fd):
        os._exit(1)
    python = f"{settings['python_prefix']}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    env = {"PATH": "/usr/bin:/bin", "HOME": BOX, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    env |= json.loads(source) if settings["command"] else {}
    command = settings["command"] or [python, "-I", "-X", "utf8", path]
    # exec drops the capabilities in its namespaces, as it is not user 0 there.
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        if not settings["command"]:
            raise
        # As a shell says it: the sandbox is whole, and its user's command is not.
        os.write(2, f"{command[0]} does not start: {error}; it or its interpreter is not seen in the sandbox".encode())
        os._exit(127)


def _has_no_reader(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _checked(LIBC.unshare(CLONE_NEWUSER), "a new user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _send_listener(fd: int, port: int) -> None:
    """Makes a socket that listens on the loopback of the new network, for the process above, and sends it there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
    with socket.socket(fileno=fd) as above, socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        socket.send_fds(above, [b"listener"], [listener.fileno()])


def _new_root(settings: dict[str, Any]) -> None:
    python_prefix = settings["python_prefix"]
    _mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    # Where links lead must not be covered either.
    paths = (python_prefix, *settings["read_only"])
    seen = [f"{path}/" for given in paths for path in (given, os.path.realpath(given))]
    root = next(p for p in MOUNT_POINTS if os.path.isdir(p) and not any(path.startswith(f"{p}/") for path in seen))
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    for path in SYSTEM_DIRS:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            _bind_read_only(path, root)
    if not python_prefix.startswith("/usr/") and python_prefix != "/usr":
        _bind_read_only(python_prefix, root)
    os.makedirs(f"{root}/etc")
    if os.path.exists("/etc/ld.so.cache"):
        _bind_file("/etc/ld.so.cache", root)
    if settings["command"] and os.path.isdir("/etc/alternatives"):
        # Debian's awk and others in /usr/bin are links to links in it.
        _bind_read_only("/etc/alternatives", root)
    os.mkdir(f"{root}/dev")
    for name in ("null", "zero", "random", "urandom"):
        _bind_file(f"/dev/{name}", root)
    os.mkdir(root + BOX)
    box = f"size={settings['disk_bytes']},nr_inodes={settings['num_files']},mode=0700,uid={NOBODY},gid={NOBODY}"
    _mount("tmpfs", root + BOX, "tmpfs", MS_NOSUID | MS_NODEV, box)
    if settings["command"]:
        # A directory, not a link, which could not be followed to where a path below it is to be seen.
        os.mkdir(f"{root}/tmp")
        _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, box)
    else:
        os.symlink(BOX, f"{root}/tmp")
    there = [f"{path}/" for path in (*SYSTEM_DIRS, python_prefix)]
    # A directory before those in it.
    for path in sorted(settings["read_only"]):
        if not any(f"{path}/".startswith(other) for other in there):
            _bind_read_only(path, root)
            there.append(f"{path}/")
    _set_attributes(root, MOUNT_ATTR_RDONLY, recursive=False)
    os.chdir(root)
    _checked(LIBC.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _checked(LIBC.umount2(b".", MNT_DETACH), "unmount the old root")
    os.chdir("/")


def _bind_read_only(path: str, root: str) -> None:
    if os.path.isdir(path):
        os.makedirs(root + path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, root + path, None, MS_BIND | MS_REC, None)
    _set_attributes(root + path, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, recursive=True)


def _bind_file(path: str, root: str) -> None:
    os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, root + path, None, MS_BIND, None)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    source_b, kind_b, data_b = (None if text is None else text.encode() for text in (source, kind, data))
    _checked(LIBC.mount(source_b, target.encode(), kind_b, ctypes.c_ulong(flags), data_b), f"mount on {target}")


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # set, clear, propagation, user namespace
    flags = AT_RECURSIVE if recursive else 0
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    result = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, ctypes.byref(wanted), size)
    _checked(result, f"mount_setattr of {path}")


def _set_limits(settings: dict[str, Any]) -> None:
    # Node.js reserves more addresses than any machine has memory, so that a command has a limit of what it may write.
    memory = "DATA" if settings["command"] else "AS"
    for name, value in (
        (memory, settings["memory_bytes"]),
        ("FSIZE", settings["file_bytes"]),
        ("NPROC", settings["num_processes"]),
        ("NOFILE", 256),
        ("CORE", 0),
        ("MEMLOCK", 0),
        ("CPU", settings["cpu_s"]),
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (limit, limit))


def _read_exactly(fd: int, count: int) -> bytes:
    parts = []
    while count and (part := os.read(fd, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()

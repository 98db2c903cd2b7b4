"""An FTP server of a directory, in which all may be read and written: ftp_server.py DIRECTORY PORT; 0: any free port.

It runs by the system's Python, which has Debian's python3-pyftpdlib. Its first line is the port.
"""

import sys

from pyftpdlib.authorizers import DummyAuthorizer  # pyright: ignore[reportMissingImports]  # not of this environment
from pyftpdlib.handlers import FTPHandler  # pyright: ignore[reportMissingImports]
from pyftpdlib.servers import FTPServer  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    authorizer = DummyAuthorizer()
    authorizer.add_user("user", "secret", sys.argv[1], perm="elradfmwMT")
    FTPHandler.authorizer = authorizer
    server = FTPServer(("127.0.0.1", int(sys.argv[2])), FTPHandler)
    print(server.address[1], flush=True)
    server.serve_forever()

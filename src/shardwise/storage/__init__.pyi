"""Give me these bytes, take these bytes: files read and written by range, in a folder or at a URL."""

from shardwise.storage.contract import DISK_WRITES as DISK_WRITES
from shardwise.storage.contract import INCOMPLETE as INCOMPLETE
from shardwise.storage.contract import LOCAL as LOCAL
from shardwise.storage.contract import LOCAL_WRITES as LOCAL_WRITES
from shardwise.storage.contract import NETWORK_FILE_SYSTEM as NETWORK_FILE_SYSTEM
from shardwise.storage.contract import NETWORK_FILE_SYSTEM_WRITES as NETWORK_FILE_SYSTEM_WRITES
from shardwise.storage.contract import OBJECT_STORE as OBJECT_STORE
from shardwise.storage.contract import OBJECT_STORE_WRITES as OBJECT_STORE_WRITES
from shardwise.storage.contract import CannotListError as CannotListError
from shardwise.storage.contract import ReadPolicy as ReadPolicy
from shardwise.storage.contract import StorageReader as StorageReader
from shardwise.storage.contract import StorageWriter as StorageWriter
from shardwise.storage.contract import WritePolicy as WritePolicy
from shardwise.storage.names import is_local as is_local
from shardwise.storage.names import is_url as is_url
from shardwise.storage.objects import ObjectWriter as ObjectWriter
from shardwise.storage.reading import LocalReader as LocalReader
from shardwise.storage.reading import OpenStorage as OpenStorage
from shardwise.storage.reading import open_storage as open_storage
from shardwise.storage.remote import RemoteReader as RemoteReader
from shardwise.storage.remote import resolve as resolve
from shardwise.storage.writing import LocalWriter as LocalWriter
from shardwise.storage.writing import open_writer as open_writer

__all__: list[str]

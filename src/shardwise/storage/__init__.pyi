"""Give me these bytes, take these bytes: files read and written by range, in a folder, memory, or at a URL."""

from shardwise.storage.hub import is_local as is_local
from shardwise.storage.hub import resolve as resolve
from shardwise.storage.opening import OpenStorage as OpenStorage
from shardwise.storage.opening import open_storage as open_storage
from shardwise.storage.opening import open_writer as open_writer
from shardwise.storage.reading.local import LocalReader as LocalReader
from shardwise.storage.reading.memory import MemoryReader as MemoryReader
from shardwise.storage.reading.policy import LOCAL as LOCAL
from shardwise.storage.reading.policy import MEMORY as MEMORY
from shardwise.storage.reading.policy import NETWORK_FILE_SYSTEM as NETWORK_FILE_SYSTEM
from shardwise.storage.reading.policy import OBJECT_STORE as OBJECT_STORE
from shardwise.storage.reading.policy import ReadPolicy as ReadPolicy
from shardwise.storage.reading.reader import CannotListError as CannotListError
from shardwise.storage.reading.reader import PageCache as PageCache
from shardwise.storage.reading.reader import StorageReader as StorageReader
from shardwise.storage.reading.remote import RemoteReader as RemoteReader
from shardwise.storage.reading.retries import Retries as Retries
from shardwise.storage.urls import is_url as is_url
from shardwise.storage.writing.fsspec_writer import FsspecWriter as FsspecWriter
from shardwise.storage.writing.local_writer import LocalWriter as LocalWriter
from shardwise.storage.writing.memory_writer import MemoryWriter as MemoryWriter
from shardwise.storage.writing.writer import DISK_WRITES as DISK_WRITES
from shardwise.storage.writing.writer import INCOMPLETE as INCOMPLETE
from shardwise.storage.writing.writer import LOCAL_WRITES as LOCAL_WRITES
from shardwise.storage.writing.writer import NETWORK_FILE_SYSTEM_WRITES as NETWORK_FILE_SYSTEM_WRITES
from shardwise.storage.writing.writer import OBJECT_STORE_WRITES as OBJECT_STORE_WRITES
from shardwise.storage.writing.writer import StorageWriter as StorageWriter
from shardwise.storage.writing.writer import WritePolicy as WritePolicy

__all__: list[str]

"""Readers and writers of files by range, in local folders or at URLs."""

from shardwise.files.local_reader import LocalReader as LocalReader
from shardwise.files.local_reader import OpenStorage as OpenStorage
from shardwise.files.local_reader import open_storage as open_storage
from shardwise.files.local_writer import LocalWriter as LocalWriter
from shardwise.files.local_writer import open_writer as open_writer
from shardwise.files.objects import RemoteReader as RemoteReader
from shardwise.files.remote import resolve as resolve
from shardwise.files.storage import DISK_WRITES as DISK_WRITES
from shardwise.files.storage import INCOMPLETE as INCOMPLETE
from shardwise.files.storage import LOCAL as LOCAL
from shardwise.files.storage import LOCAL_WRITES as LOCAL_WRITES
from shardwise.files.storage import NETWORK_FILE_SYSTEM as NETWORK_FILE_SYSTEM
from shardwise.files.storage import NETWORK_FILE_SYSTEM_WRITES as NETWORK_FILE_SYSTEM_WRITES
from shardwise.files.storage import OBJECT_STORE as OBJECT_STORE
from shardwise.files.storage import CannotListError as CannotListError
from shardwise.files.storage import ReadPolicy as ReadPolicy
from shardwise.files.storage import StorageReader as StorageReader
from shardwise.files.storage import StorageWriter as StorageWriter
from shardwise.files.storage import WritePolicy as WritePolicy
from shardwise.files.urls import is_local as is_local
from shardwise.files.urls import is_url as is_url

__all__: list[str]

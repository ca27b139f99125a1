"""What a location is in the server: the names of its keys, what rows take, and the Lua scripts that work on them.

Each script is one atomic step. ``docs/format.md`` describes the keys.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from prefixstore.backends.contract import Change, Costs

MAGIC = b"prefixstore"
# of the keys of a location and what is in them
VALKEY_VERSION = 5
# What a row takes in the server's memory: its slots in a hash and a sorted set, and its key a second time; and what a
# payload takes: its name, and its slot in the database. Measured with 50,000 of each, whose keys have 33 bytes.
COSTS = Costs(row=160, payload=140)
# in a row: what it and its payload weigh, and then its value
_WEIGHTS = struct.Struct("<IQ")
VALUE_AT = _WEIGHTS.size
_LENGTH = struct.Struct("<I")


def packed(change: Change) -> bytes:
    """A change, as the script takes it: a key, and what is stored in the row, each with its length."""
    key, value, payload = change
    row = b""
    if value is not None:
        weight = COSTS.of(key, value)
        row = _WEIGHTS.pack(weight, 0 if payload is None else COSTS.of(key, value, len(payload)) - weight) + value
    return _LENGTH.pack(len(key)) + key + _LENGTH.pack(len(row)) + row


class Names(NamedTuple):
    """The names of the keys of a location."""

    # a hash: what the location is, and how many rows and bytes it has
    meta: bytes
    # a hash: by the key of a row, what the row and its payload weigh, and its value
    rows: bytes
    # a sorted set of the keys of all rows; all scores are 0
    order: bytes
    # whose turn it is to write
    lock: bytes
    # with the key of a row: its payload
    payloads: bytes
    # payloads that are not committed yet
    staged: bytes

    @classmethod
    def of(cls, name: str) -> Names:
        """The names for a location of this name."""
        return cls(*(f"{{{name}}}:{kind}".encode() for kind in ("meta", "rows", "order", "lock", "payload:", "new:")))


_NAMES = "local META, ROWS, ORDER, LOCK, PAYLOADS, STAGED = unpack(KEYS)\n"
# also by a replica, and by a server that is out of memory
_READER = f"#!lua flags=no-writes\n{_NAMES}"
# What a script writes is small, and it must not end half way. Payloads are written without a script, and refused by a
# server that is out of memory.
_WRITER = f"#!lua flags=allow-oom\n{_NAMES}"

# How many rows and bytes there are, nothing if the server has evicted a part of them; and what the location is.
# Of keys that are another application's it raises an error.
_COUNTS = f"local MAGIC, FORMAT = '{MAGIC.decode()}', '{VALKEY_VERSION}'\n"
_COUNTS += """
local function counts()
  local counted = redis.call('HMGET', META, 'rows', 'bytes')
  local n_hashed, n_ordered = redis.call('HLEN', ROWS), redis.call('ZCARD', ORDER)
  local n_rows, n_bytes = tonumber(counted[1]), tonumber(counted[2])
  if n_bytes and n_hashed == n_rows and n_ordered == n_rows then return n_rows, n_bytes end
end
local function head()
  local meta, n_rows, n_bytes = redis.call('HMGET', META, 'magic', 'format'), counts()
  return {redis.call('EXISTS', META), meta[1], meta[2], n_rows and string.format('%.0f', n_bytes) or false,
    redis.call('EXISTS', META, ROWS, ORDER)}
end
"""

# What the location is: whether anything says so, its magic and format, its bytes if it is complete, and how many of its
# keys there are.
HEAD = _READER + _COUNTS + "return head()"

# The rows of ranges. ARGV: of each range its start, its stop, how many rows, -1 for all, and 'R' if it is walked from
# its end. Of each range: how many rows; of each row the length of its key and of what is stored, and these. It is one
# string, which a client reads much faster than thousands.
RANGES = (
    _READER
    + """
local answer = {}
for at = 1, #ARGV, 4 do
  local start, stop, keys = '[' .. ARGV[at], '(' .. ARGV[at + 1]
  if ARGV[at + 3] == 'R' then keys = redis.call('ZREVRANGEBYLEX', ORDER, stop, start, 'LIMIT', 0, ARGV[at + 2])
  else keys = redis.call('ZRANGEBYLEX', ORDER, start, stop, 'LIMIT', 0, ARGV[at + 2]) end
  local rows = {}
  for _, key in ipairs(keys) do
    local row = redis.call('HGET', ROWS, key)
    if row then rows[#rows + 1] = struct.pack('<I4I4', #key, #row) .. key .. row end
  end
  answer[#answer + 1] = struct.pack('<I4', #rows) .. table.concat(rows)
end
return table.concat(answer)
"""
)

# Take the lock, unless another one has it. ARGV: whose; for how long, in milliseconds; and 1 to make an empty location
# in the place of one that is incomplete. Another application's location, or one of another version, stays as it is. A
# script that fails in the middle leaves what it has written until then: so it is found out here whether the user may do
# all that a commit does.
BEGIN = (
    _WRITER
    + _COUNTS
    + """
local found = head()
if found[1] == 1 and (found[2] ~= MAGIC or found[3] ~= FORMAT) then return found end
for _, command in ipairs({{'RENAME', STAGED, PAYLOADS}, {'PERSIST', PAYLOADS}, {'UNLINK', PAYLOADS},
    {'EXISTS', STAGED}, {'HGET', ROWS, ''}, {'HSET', ROWS, '', ''},
    {'HDEL', ROWS, ''}, {'ZADD', ORDER, '0', ''}, {'ZREM', ORDER, ''}, {'SET', LOCK, ''}, {'DEL', LOCK}}) do
  if not redis.acl_check_cmd(unpack(command)) then
    return redis.error_reply('NOPERM this user has no permissions to run the ' .. string.lower(command[1])
      .. ' command on ' .. command[2])
  end
end
local owner = redis.call('GET', LOCK)
if owner and owner ~= ARGV[1] then return false end
redis.call('SET', LOCK, ARGV[1], 'PX', ARGV[2])
if not found[4] and ARGV[3] == '1' then
  redis.call('UNLINK', META, ROWS, ORDER)
  redis.call('HSET', META, 'magic', MAGIC, 'format', FORMAT, 'rows', 0, 'bytes', 0)
  return head()
end
return found
"""
)

# Keep the lock or release it. ARGV: whose; for how long it goes on, 0 to end it.
KEEP = (
    _WRITER
    + """
if redis.call('GET', LOCK) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', LOCK, ARGV[2])
"""
)

# Write all changes or nothing, and release the lock. ARGV: whose; what the names of its payloads begin with; how many
# there are; and the changes: a key, and what is stored in its row, nothing to delete it, each with its length.
COMMIT = (
    _WRITER
    + _COUNTS
    + """
local n_rows, n_bytes = counts()
if redis.call('GET', LOCK) ~= ARGV[1] or not n_rows then return 'lost' end
for number = 1, tonumber(ARGV[3]) do
  if redis.call('EXISTS', ARGV[2] .. number) == 0 then return 'evicted' end
end
-- what a row and its payload weigh stands before its value
local WEIGHTS = '<I4I8'
local function weights(row)
  if not row or #row < 12 then return 0, 0 end
  local weight, payload = struct.unpack(WEIGHTS, row)
  return weight, payload
end
local at, number = 1, 0
while at <= #ARGV[4] do
  local key, row
  key, row, at = struct.unpack('<I4c0I4c0', ARGV[4], at)
  local name, old = PAYLOADS .. key, redis.call('HGET', ROWS, key)
  local weight, payload = weights(row)
  local old_weight, old_payload = weights(old)
  if row ~= '' then
    if payload > 0 then
      number = number + 1
      redis.call('RENAME', ARGV[2] .. number, name)
      redis.call('PERSIST', name)
    elseif old_payload > 0 then
      payload, row = old_payload, struct.pack(WEIGHTS, weight, old_payload) .. string.sub(row, 13)
    end
    redis.call('HSET', ROWS, key, row)
    if not old then
      redis.call('ZADD', ORDER, 0, key)
      n_rows = n_rows + 1
    end
  elseif old then
    redis.call('HDEL', ROWS, key)
    redis.call('ZREM', ORDER, key)
    redis.call('UNLINK', name)
    n_rows = n_rows - 1
  end
  n_bytes = n_bytes + weight + payload - old_weight - old_payload
end
redis.call('HSET', META, 'rows', n_rows, 'bytes', string.format('%.0f', n_bytes))
redis.call('DEL', LOCK)
return 'committed'
"""
)

# Write something that means nothing. A key of its own: any other may have been evicted.
TICK = _WRITER + "return redis.call('SET', STAGED .. 'sync', '', 'PX', 60000)"

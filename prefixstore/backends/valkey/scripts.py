"""What a location is in the server: the names of its keys, and the Lua scripts that work on them.

Each script is one atomic step. ``docs/format.md`` describes the keys.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BEGIN", "COMMIT", "HEAD", "RANGES", "RELEASE", "ROW", "START", "TICK", "Names"]


class Names(NamedTuple):
    """The names of the keys of a location. What is in braces keeps them on one node of a cluster."""

    # a hash: what the location is, how many rows and bytes it has, and who committed last
    meta: bytes
    # a hash: by the key of a row, what the row and its payload weigh, and its value
    rows: bytes
    # a sorted set of the keys of all rows; all scores are 0
    order: bytes
    # whose turn it is to write
    lock: bytes
    # with the key of a row: its value and its payload, so that the two are read with one GET and belong together
    payloads: bytes
    # payloads that are not committed yet
    staged: bytes

    @classmethod
    def of(cls, name: str) -> Names:
        """The names for a location of this name."""
        return cls(*(f"{{{name}}}:{kind}".encode() for kind in ("meta", "rows", "order", "lock", "payload:", "new:")))


_NAMES = """
local META, ROWS, ORDER, LOCK, PAYLOADS, STAGED = unpack(KEYS)
-- what a row weighs, and its payload, stand before its value
local WEIGHTS = '<I4I8'
local function weights(row)
  if not row or #row < 12 then return 0, 0 end
  local own, payload = struct.unpack(WEIGHTS, row)
  return own, payload
end
-- how many rows and bytes there are; nothing if the server has evicted a part of them
local function counts()
  local counted = redis.call('HMGET', META, 'rows', 'bytes')
  for _, number in ipairs(counted) do
    if not number or not string.match(number, '^%d+$') then return nil end
  end
  local n_rows, n_bytes = tonumber(counted[1]), tonumber(counted[2])
  if redis.call('HLEN', ROWS) ~= n_rows or redis.call('ZCARD', ORDER) ~= n_rows then return nil end
  return n_rows, n_bytes
end
local function head()
  local meta, n_rows = redis.call('HMGET', META, 'magic', 'format', 'bytes'), counts()
  return {redis.call('EXISTS', META), meta[1], meta[2], n_rows and meta[3] or false,
    redis.call('EXISTS', META, ROWS, ORDER)}
end
"""

# Why nothing may be written, if so. A script that fails in the middle leaves what it has written until then: so it is
# found out before whether all of it can be.
_REFUSAL = """
local function refusal()
  for name, kind in pairs({[META] = 'hash', [ROWS] = 'hash', [ORDER] = 'zset', [LOCK] = 'string'}) do
    local found = redis.call('TYPE', name)['ok']
    if found ~= kind and found ~= 'none' then
      return redis.error_reply('WRONGTYPE ' .. name .. ' is not a ' .. kind .. ' but a ' .. found)
    end
  end
  for _, command in ipairs({{'RENAME', STAGED, PAYLOADS}, {'PERSIST', PAYLOADS}, {'UNLINK', PAYLOADS},
      {'EXISTS', STAGED}, {'GET', PAYLOADS}, {'SET', PAYLOADS, ''}, {'HGET', ROWS, ''}, {'HSET', ROWS, '', ''},
      {'HDEL', ROWS, ''}, {'ZADD', ORDER, '0', ''}, {'ZREM', ORDER, ''}, {'DEL', LOCK}}) do
    if not redis.acl_check_cmd(unpack(command)) then
      return redis.error_reply('NOPERM this user has no permissions to run the ' .. string.lower(command[1])
        .. ' command on ' .. command[2])
    end
  end
end
"""


def _reader(body: str) -> str:
    # also by a replica, and by a server that is out of memory
    return f"#!lua flags=no-writes\n{_NAMES}{body}"


def _writer(body: str) -> str:
    # What a script writes is small, and it must not end half way. Payloads are written without a script, and refused
    # by a server that is out of memory.
    return f"#!lua flags=allow-oom\n{_NAMES}{_REFUSAL}{body}"


# What the location is: whether anything says so, its magic and format, its bytes if it is complete, and how many of its
# keys there are.
HEAD = _reader("return head()")

# The rows of ranges. ARGV: after how many rows the answer ends, since others wait meanwhile; then of each range its
# start, its stop, how many rows, -1 for all, and 'R' if it is walked from its end. Of each range: its keys, its rows.
RANGES = _reader("""
local left, answer = tonumber(ARGV[1]), {}
for at = 2, #ARGV, 4 do
  local start, stop, most = '[' .. ARGV[at], '(' .. ARGV[at + 1], tonumber(ARGV[at + 2])
  if most < 0 or most > left then most = left end
  local keys
  if ARGV[at + 3] == 'R' then keys = redis.call('ZREVRANGEBYLEX', ORDER, stop, start, 'LIMIT', 0, most)
  else keys = redis.call('ZRANGEBYLEX', ORDER, start, stop, 'LIMIT', 0, most) end
  answer[#answer + 1] = {keys, #keys > 0 and redis.call('HMGET', ROWS, unpack(keys)) or {}}
  left = left - #keys
  if left == 0 then break end
end
return answer
""")

# A row, and what is stored with its payload. ARGV: its key.
ROW = _reader("return {redis.call('HGET', ROWS, ARGV[1]), redis.call('GET', PAYLOADS .. ARGV[1])}")

# Take the lock, unless another one has it. ARGV: whose; for how long, in milliseconds; magic and format. Another
# application's location, or one of another version, stays as it is.
BEGIN = _writer("""
if redis.call('EXISTS', META) == 1 then
  local meta = redis.call('HMGET', META, 'magic', 'format')
  if meta[1] ~= ARGV[3] or meta[2] ~= ARGV[4] then return head() end
end
local why_not = refusal()
if why_not then return why_not end
local owner = redis.call('GET', LOCK)
if owner and owner ~= ARGV[1] then return false end
redis.call('SET', LOCK, ARGV[1], 'PX', ARGV[2])
return head()
""")

# Make an empty location, in the place of what is left of an older one. ARGV: whose turn it is; magic and format.
START = _writer("""
if redis.call('GET', LOCK) ~= ARGV[1] then return 0 end
redis.call('UNLINK', META, ROWS, ORDER)
redis.call('HSET', META, 'magic', ARGV[2], 'format', ARGV[3], 'last', '', 'rows', 0, 'bytes', 0)
return 1
""")

# Keep the lock or release it. ARGV: whose; for how long it goes on, 0 to end it.
RELEASE = _writer("""
if redis.call('GET', LOCK) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', LOCK) end
return redis.call('PEXPIRE', LOCK, ARGV[2])
""")

# Write all changes or nothing, and release the lock. ARGV: whose; what the names of its payloads begin with; how many
# there are; and the changes: key, weight (0 to delete the row), weight of the payload (0 for none), value. If the
# answer is lost and this is sent again, it is known to be done.
COMMIT = _writer("""
if redis.call('HGET', META, 'last') == ARGV[1] then return 'committed' end
local why_not = refusal()
if why_not then return why_not end
local n_rows, n_bytes = counts()
if redis.call('GET', LOCK) ~= ARGV[1] or not n_rows then return 'lost' end
for number = 1, tonumber(ARGV[3]) do
  if redis.call('EXISTS', ARGV[2] .. number) == 0 then return 'evicted' end
end
local function rewrite_head(name, value)
  -- pcall: it may be another application's by now
  local stored = redis.pcall('GET', name)
  if type(stored) ~= 'string' or #stored < 4 then return end
  redis.call('SET', name, struct.pack('<I4', #value) .. value .. string.sub(stored, 5 + struct.unpack('<I4', stored)))
end
local at, changes, number = 1, ARGV[4], 0
while at <= #changes do
  local key, weight, payload, value
  key, weight, payload, value, at = struct.unpack('<I2c0I4I8I4c0', changes, at)
  local name, old = PAYLOADS .. key, redis.call('HGET', ROWS, key)
  local old_weight, old_payload = weights(old)
  if weight == 0 then
    if old then
      redis.call('HDEL', ROWS, key)
      redis.call('ZREM', ORDER, key)
      redis.call('UNLINK', name)
      n_rows = n_rows - 1
    end
  else
    if payload > 0 then
      number = number + 1
      redis.call('RENAME', ARGV[2] .. number, name)
      redis.call('PERSIST', name)
    elseif old_payload > 0 then
      payload = old_payload
      if string.sub(old, 13) ~= value then rewrite_head(name, value) end
    end
    redis.call('HSET', ROWS, key, struct.pack(WEIGHTS, weight, payload) .. value)
    if not old then
      redis.call('ZADD', ORDER, 0, key)
      n_rows = n_rows + 1
    end
  end
  n_bytes = n_bytes + weight + payload - old_weight - old_payload
end
redis.call('HSET', META, 'last', ARGV[1], 'rows', n_rows, 'bytes', string.format('%.0f', n_bytes))
redis.call('DEL', LOCK)
return 'committed'
""")

# Write something that means nothing. ARGV: a name.
TICK = _writer("return redis.call('SET', ARGV[1], '', 'PX', 60000)")

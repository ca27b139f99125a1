"""The Lua scripts that run in the server, each as one atomic step; sent once and then called by their digest.

Their keys are always the same, as `Names` lists them. A script that reads returns many entries as one string, in which
each has its key and its length: that is faster to send and to parse than thousands of replies.
"""

from __future__ import annotations

from hashlib import sha1
from typing import NamedTuple

__all__ = [
    "BEGIN",
    "COMMIT",
    "ENTRIES",
    "FACTS",
    "GONE",
    "HAVE_ENTRIES",
    "HEAD",
    "RANGES",
    "RELEASE",
    "REPLACE",
    "SWEEP",
    "TICK",
    "WALK",
    "Script",
]


class Script(NamedTuple):
    """A script, and the digest by which the server knows it."""

    text: str
    digest: str


_KEYS = """
local META, ENTRIES, ORDER, CHILDREN, SETTINGS, NOTES, LOG, LOCK, PAGES = unpack(KEYS)
-- nothing for what is not the key of a page
local function found(key, value) return #key == 32 and key .. struct.pack('<I4', #value) .. value or '' end
-- how many of the structures there are; one that cannot be read counts as missing
local function n_structures()
  local n = redis.call('EXISTS', META, ENTRIES, ORDER, CHILDREN, SETTINGS)
  if n ~= 5 then return n end
  for _, number in ipairs(redis.call('HMGET', META, 'generation', 'entries', 'bytes', 'stored', 'raw')) do
    if not number or not string.match(number, '^%-?%d+$') then return 4 end
  end
  return 5
end
local function is_complete() return n_structures() == 5 end
"""

# What is true of the whole location, and its changes since a generation that the caller has seen. ARGV[at]: that
# generation; ARGV[at + 1]: how many changed pages are worth sending at once. With n = 5 keys the location is complete;
# with none it is empty; otherwise the server has evicted a part of it.
_HEAD = (
    _KEYS
    + """
local function head(at)
  local n = n_structures()
  local meta = redis.call('HMGET', META, 'magic', 'format', 'generation', 'change', 'entries', 'bytes', 'stored', 'raw')
  if n ~= 5 then return {n, meta, false, {}, ''} end
  local since, now = tonumber(ARGV[at]), tonumber(meta[3])
  if not now or since < 0 or since > now then return {n, meta, false, {}, ''} end
  if since == now then return {n, meta, meta[4], {}, ''} end
  local before = redis.call('HGET', LOG, ARGV[at])
  local changes, pages, n_keys, seen, most = {}, {}, 0, {}, tonumber(ARGV[at + 1])
  if now - since > 4096 then return {n, meta, before and string.sub(before, 1, 16), {}, ''} end
  for generation = since + 1, now do
    local keys = redis.call('HGET', LOG, string.format('%.0f', generation))
    if not keys then return {n, meta, before and string.sub(before, 1, 16), {}, ''} end
    changes[#changes + 1] = keys
    n_keys = n_keys + #keys / 32
  end
  if n_keys <= most then
    for _, keys in ipairs(changes) do
      for i = 17, #keys, 32 do
        local key = string.sub(keys, i, i + 31)
        if #key == 32 and not seen[key] then
          seen[key] = true
          pages[#pages + 1] = found(key, redis.call('HGET', ENTRIES, key) or '')
        end
      end
    end
  else
    pages = false
  end
  return {n, meta, before and string.sub(before, 1, 16), changes, pages and table.concat(pages)}
end
"""
)


def _script(body: str, *, flags: str, prelude: str = _KEYS) -> Script:
    text = f"#!lua flags={flags}\n{prelude}{body}"
    return Script(text, sha1(text.encode()).hexdigest())  # noqa: S324 - that is how servers name scripts


def _reader(body: str, *, prelude: str = _KEYS) -> Script:
    # also by a replica, and by a server that is out of memory
    return _script(body, flags="no-writes", prelude=prelude)


def _writer(body: str, *, prelude: str = _KEYS) -> Script:
    # What a script writes is small, and it must not end half way. Values of pages are written without a script, and
    # refused by a server that is out of memory.
    return _script(body, flags="allow-oom", prelude=prelude)


# the key of a page, as hexadecimal digits at the end of the name of its value
_KEY_IN = """
local function key_in(name)
  return (string.gsub(string.sub(name, -64), '..', function(two) return string.char(tonumber(two, 16) or 0) end))
end
"""

HEAD = _reader("return head(1)", prelude=_HEAD)

# Entries of some pages. ARGV: their keys in one string; '1' to stop at the first that is missing.
ENTRIES = _reader("""
local some = {}
for i = 1, #ARGV[1], 32 do
  local key = string.sub(ARGV[1], i, i + 31)
  local value = redis.call('HGET', ENTRIES, key)
  if value then some[#some + 1] = found(key, value) elseif ARGV[2] == '1' then break end
end
return table.concat(some)
""")

# Some entries, and where those come that follow: all at least once, in no order. ARGV: where, and about how many.
WALK = _reader("""
local answer, some = redis.call('HSCAN', ENTRIES, ARGV[1], 'COUNT', ARGV[2]), {}
for i = 1, #answer[2], 2 do some[#some + 1] = found(answer[2][i], answer[2][i + 1]) end
return {answer[1], table.concat(some)}
""")

# The beginnings of entries in the order of their keys. ARGV: after which key, how many, and how long a beginning is.
FACTS = _reader("""
local some, length, after, before = {}, tonumber(ARGV[3]), ARGV[1], nil
repeat
  before = after
  for _, key in ipairs(redis.call('ZRANGEBYLEX', ORDER, '(' .. before, '+', 'LIMIT', 0, ARGV[2])) do
    -- what is out of order would be read again and again
    if key > after then
      after = key
      if #key == 32 then
        local value = redis.call('HGET', ENTRIES, key) or ''
        local head = string.sub(value, 1, length)
        some[#some + 1] = key .. struct.pack('<I4', #value) .. head .. string.rep('\\0', length - #head)
      end
    end
  end
until #some > 0 or after == before
return table.concat(some)
""")

# Members of the index of children. ARGV: '1' for entries too; then of each range both ends, how many, and 'R' if it is
# walked from its end. Each member comes as the number of its range, its key, and its entry.
RANGES = _reader("""
local some = {}
for at = 2, #ARGV, 4 do
  local members
  if ARGV[at + 3] == 'R' then
    members = redis.call('ZREVRANGEBYLEX', CHILDREN, ARGV[at + 1], ARGV[at], 'LIMIT', 0, ARGV[at + 2])
  else
    members = redis.call('ZRANGEBYLEX', CHILDREN, ARGV[at], ARGV[at + 1], 'LIMIT', 0, ARGV[at + 2])
  end
  for _, member in ipairs(members) do
    local key = string.sub(member, -32)
    local value = ''
    if ARGV[1] == '1' then value = redis.call('HGET', ENTRIES, key) end
    if value and #key == 32 then some[#some + 1] = struct.pack('<I4', (at - 2) / 4) .. found(key, value) end
  end
end
return table.concat(some)
""")

# Which of some values have an entry. ARGV: their names. For each 1 or 0, or `GONE` if the value is not there any more.
GONE = -1
HAVE_ENTRIES = _reader(
    _KEY_IN
    + """
local some = {}
for i, name in ipairs(ARGV) do
  if redis.call('EXISTS', name) == 0 then some[i] = -1 else some[i] = redis.call('HEXISTS', ENTRIES, key_in(name)) end
end
return some
"""
)

# Why nothing may be written, if so. A script that fails in the middle leaves what it has written until then: so it is
# found out before whether all of it can be.
_REFUSAL = """
local function refusal()
  local kinds = {[ENTRIES] = 'hash', [ORDER] = 'zset', [CHILDREN] = 'zset', [SETTINGS] = 'hash', [NOTES] = 'hash',
    [LOG] = 'hash', [LOCK] = 'string'}
  for name, kind in pairs(kinds) do
    local found = redis.call('TYPE', name)['ok']
    if found ~= kind and found ~= 'none' then
      return redis.error_reply('WRONGTYPE ' .. name .. ' is not a ' .. kind .. ' but a ' .. found)
    end
  end
  for _, command in ipairs({{'RENAME', PAGES, PAGES}, {'UNLINK', PAGES}, {'PERSIST', PAGES}, {'PEXPIRE', PAGES, '1'},
      {'EXISTS', PAGES}, {'HGET', META, ''}, {'HSET', META, '', ''}, {'HDEL', META, ''}, {'ZADD', ORDER, '0', ''},
      {'ZREM', ORDER, ''}, {'SET', LOCK, ''}, {'DEL', LOCK}}) do
    if not redis.acl_check_cmd(unpack(command)) then
      return redis.error_reply('NOPERM this user has no permissions to run the ' .. string.lower(command[1])
        .. ' command on ' .. command[2])
    end
  end
end
"""

# Begin a transaction. ARGV: as HEAD; whose; for how long, in milliseconds; magic and format of a new location. An
# empty location is made, and so is one of which the server has evicted a part: what is left of that is dropped. Its
# generations begin with the time, so that no earlier location had the same.
BEGIN = _writer(
    """
local kind = redis.call('TYPE', META)['ok']
if kind ~= 'none' then
  -- another application's, or of another version
  if kind ~= 'hash' or redis.call('HGET', META, 'magic') ~= ARGV[5] then return head(1) end
  if redis.call('HGET', META, 'format') ~= ARGV[6] then return head(1) end
end
local why_not = refusal()
if why_not then return why_not end
local owner = redis.call('GET', LOCK)
if owner and owner ~= ARGV[3] then return false end
local is_new = 0
if not is_complete() then
  if redis.call('UNLINK', META, ENTRIES, ORDER, CHILDREN, SETTINGS, LOG) > 0 then is_new = 1 end
  local now = redis.call('TIME')
  redis.call('HSET', META, 'magic', ARGV[5], 'format', ARGV[6], 'generation', now[1] .. string.format('%06d', now[2]),
    'change', ARGV[3], 'last', '', 'entries', 0, 'bytes', 0, 'stored', 0, 'raw', 0)
  redis.call('HSET', ENTRIES, '', '')
  redis.call('ZADD', ORDER, 0, '')
  redis.call('ZADD', CHILDREN, 0, '')
  redis.call('HSET', SETTINGS, '', '')
end
redis.call('SET', LOCK, ARGV[3], 'PX', ARGV[4])
local answer = head(1)
answer[6] = is_new
return answer
""",
    prelude=_HEAD + _REFUSAL,
)

# End a transaction that changes nothing, or keep it. ARGV: whose; for how long it goes on, 0 to end it.
RELEASE = _writer("""
if redis.call('GET', LOCK) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', LOCK) end
return redis.call('PEXPIRE', LOCK, ARGV[2])
""")

# Commit a transaction: all of it or nothing. ARGV: whose; the generation at its beginning; the new one, or '' if no
# page has changed; what goes into the log of changes; what is forgotten there; four counts; and then what it does.
COMMIT = _writer(
    """
if redis.call('HGET', META, 'last') == ARGV[1] then return 'committed' end
local why_not = refusal()
if why_not then return why_not end
if redis.call('GET', LOCK) ~= ARGV[1] or not is_complete() then return 'lost' end
if redis.call('HGET', META, 'generation') ~= ARGV[2] then return 'lost' end
local function expire(name, life)
  if life == '0' then redis.call('PERSIST', name) else redis.call('PEXPIRE', name, life) end
end
local at = 10
while at <= #ARGV do
  if ARGV[at] == 'put' and redis.call('EXISTS', ARGV[at + 4]) == 0 then return 'evicted' end
  at = at + ({put = 7, delete = 4, touch = 5, discard = 2, settings = 3, note = 3})[ARGV[at]]
end
at = 10
while at <= #ARGV do
  local what = ARGV[at]
  if what == 'put' then
    local key, entry, member, staged, name, expires = unpack(ARGV, at + 1, at + 6)
    redis.call('RENAME', staged, name)
    expire(name, expires)
    redis.call('HSET', ENTRIES, key, entry)
    redis.call('ZADD', ORDER, 0, key)
    redis.call('ZADD', CHILDREN, 0, member)
    at = at + 7
  elseif what == 'delete' then
    redis.call('HDEL', ENTRIES, ARGV[at + 1])
    redis.call('ZREM', ORDER, ARGV[at + 1])
    if ARGV[at + 2] ~= '' then redis.call('ZREM', CHILDREN, ARGV[at + 2]) end
    redis.call('UNLINK', ARGV[at + 3])
    at = at + 4
  elseif what == 'touch' then
    local entry, usage = redis.call('HGET', ENTRIES, ARGV[at + 1]), ARGV[at + 2]
    if entry then
      redis.call('HSET', ENTRIES, ARGV[at + 1], string.sub(entry, 1, 24) .. usage .. string.sub(entry, 49))
      -- whether it is pinned, and until when it lasts
      if string.sub(entry, 37, 37) ~= string.sub(usage, 13, 13)
          or string.sub(entry, 41, 48) ~= string.sub(usage, 17) then
        expire(ARGV[at + 4], ARGV[at + 3])
      end
    end
    at = at + 5
  elseif what == 'discard' then
    redis.call('UNLINK', ARGV[at + 1])
    at = at + 2
  else
    local hash = what == 'note' and NOTES or SETTINGS
    -- the first letter says whether there is a value
    if ARGV[at + 2] == '' then redis.call('HDEL', hash, ARGV[at + 1])
    else redis.call('HSET', hash, ARGV[at + 1], string.sub(ARGV[at + 2], 2)) end
    at = at + 3
  end
end
redis.call('HSET', META, 'last', ARGV[1], 'entries', ARGV[6], 'bytes', ARGV[7], 'stored', ARGV[8], 'raw', ARGV[9])
if ARGV[3] ~= '' then
  redis.call('HSET', META, 'generation', ARGV[3], 'change', ARGV[1])
  redis.call('HSET', LOG, ARGV[3], ARGV[4])
  redis.call('HDEL', LOG, ARGV[5])
end
redis.call('DEL', LOCK)
return 'committed'
""",
    prelude=_KEYS + _REFUSAL,
)

# Put an order that was rebuilt in the place of the old one. ARGV: whose; the new generation; four counts; and the
# names of the two sets.
REPLACE = _writer("""
if redis.call('HGET', META, 'last') == ARGV[1] then return 'committed' end
if redis.call('GET', LOCK) ~= ARGV[1] or not is_complete() then return 'lost' end
if redis.call('EXISTS', ARGV[7], ARGV[8]) ~= 2 then return 'evicted' end
redis.call('RENAME', ARGV[7], ORDER)
redis.call('RENAME', ARGV[8], CHILDREN)
redis.call('PERSIST', ORDER)
redis.call('PERSIST', CHILDREN)
redis.call('HSET', META, 'last', ARGV[1], 'entries', ARGV[3], 'bytes', ARGV[4], 'stored', ARGV[5], 'raw', ARGV[6])
redis.call('HSET', META, 'generation', ARGV[2], 'change', ARGV[1])
redis.call('DEL', LOG, LOCK)
return 'committed'
""")

# Write something that means nothing. ARGV: a name.
TICK = _writer("return redis.call('SET', ARGV[1], '', 'PX', 60000)")

# Delete values of pages that have no entry. ARGV: their names.
SWEEP = _writer(
    _KEY_IN
    + """
local n = 0
for _, name in ipairs(ARGV) do
  if redis.call('HEXISTS', ENTRIES, key_in(name)) == 0 then n = n + redis.call('UNLINK', name) end
end
return n
"""
)

"""Whether the tables of a PostgreSQL store are as the migrations made them.

Another role may have created tables of these names first, or may have put triggers, rules or policies on them. Such
code runs with the rights of the user of the table, and may change what is stored. So the server's catalogs are asked
before anything is read from a table. All names are qualified with ``pg_catalog``, so no other schema can provide a
function.
"""

from __future__ import annotations

from typing import Any

import psycopg

from prefixstore.backends.sql.database import TABLES
from prefixstore.backends.sql.migrations import VERSION_TABLE
from prefixstore.errors import IncompatibleError

__all__ = ["SET_SEARCH_PATH", "plain_tables", "require_our_columns"]

_NAMED = ", ".join(f"'{name}'" for name in (*TABLES, VERSION_TABLE))

# Sent on each new connection. The schema is the first of the search path that has one of the tables, or the first one
# if none has. The server looks into pg_catalog before it; temporary tables come last, or they would hide those of the
# store.
SET_SEARCH_PATH = f"""
SELECT pg_catalog.set_config('search_path', pg_catalog.concat_ws(', ', (
    SELECT pg_catalog.quote_ident(path.name)
    FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY AS path (name, place)
    WHERE path.name <> 'pg_catalog'
    ORDER BY NOT EXISTS (
        SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = path.name AND c.relname IN ({_NAMED})
    ), path.place
    LIMIT 1
), 'pg_temp'), false)
"""  # noqa: S608 - constants

# The tables of the schema that is on the search path: name, owner, whether that owner is trusted, and what is wrong. An
# owner is trusted who could change them anyway, of whose role this one is a member (but a superuser is one of every
# role), or who owns a schema that was named. "$user", which is used unless another is named, may have been created by
# anyone.
_TABLES = f"""
SELECT c.oid, c.relname::pg_catalog.text AS name, pg_catalog.pg_get_userbyid(c.relowner)::pg_catalog.text AS owner,
    owner.rolsuper OR c.relowner IN (me.oid, d.datdba)
        OR (NOT me.rolsuper AND pg_catalog.pg_has_role(me.oid, c.relowner, 'MEMBER'))
        OR (c.relowner = n.nspowner AND n.nspname <> me.rolname) AS is_trusted,
    CASE WHEN (c.relkind, c.relpersistence) <> ('r', 'p') THEN 'is not an ordinary, logged table'
        WHEN c.relrowsecurity THEN 'has row-level security' END AS wrong
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles AS owner ON owner.oid = c.relowner
JOIN pg_catalog.pg_roles AS me ON me.rolname = current_user
JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
WHERE n.nspname = ANY (pg_catalog.current_schemas(false)) AND c.relname IN ({_NAMED})
"""  # noqa: S608 - constants
_OURS = f"SELECT oid FROM ({_TABLES}) AS ours"  # noqa: S608 - constants

# what is attached to these tables: table, kind, name
_ATTACHED = f"""
SELECT tgrelid::pg_catalog.regclass::pg_catalog.text, 'trigger', tgname::pg_catalog.text FROM pg_catalog.pg_trigger
WHERE tgrelid IN ({_OURS}) AND NOT tgisinternal
UNION ALL SELECT ev_class::pg_catalog.regclass::pg_catalog.text, 'rule', rulename::pg_catalog.text
FROM pg_catalog.pg_rewrite WHERE ev_class IN ({_OURS})
UNION ALL SELECT inhparent::pg_catalog.regclass::pg_catalog.text, 'child table',
    inhrelid::pg_catalog.regclass::pg_catalog.text
FROM pg_catalog.pg_inherits WHERE inhparent IN ({_OURS})
UNION ALL SELECT inhrelid::pg_catalog.regclass::pg_catalog.text, 'parent table',
    inhparent::pg_catalog.regclass::pg_catalog.text
FROM pg_catalog.pg_inherits WHERE inhrelid IN ({_OURS})
"""  # noqa: S608 - constants

# Columns, and primary and foreign keys and all else that may reject a row; from PostgreSQL 18 on NOT NULL is a
# constraint too.
_COLUMNS = f"""
SELECT ours.name, pg_catalog.concat(a.attname, ' ', pg_catalog.format_type(a.atttypid, a.atttypmod),
    CASE WHEN a.attnotnull THEN ' NOT NULL' END,
    CASE WHEN a.atthasdef OR a.attidentity <> '' THEN ' with a default' END)
FROM ({_TABLES}) AS ours JOIN pg_catalog.pg_attribute AS a ON a.attrelid = ours.oid
WHERE a.attnum > 0 AND NOT a.attisdropped
UNION ALL SELECT ours.name, pg_catalog.pg_get_constraintdef(k.oid)
FROM ({_TABLES}) AS ours JOIN pg_catalog.pg_constraint AS k ON k.conrelid = ours.oid
WHERE k.contype <> 'n'
"""  # noqa: S608 - constants

# as the newest revision makes them
COLUMNS = {
    ("prefixstore_meta", "id smallint NOT NULL"),
    ("prefixstore_meta", "magic character varying(16) NOT NULL"),
    ("prefixstore_meta", "format integer NOT NULL"),
    ("prefixstore_meta", "bytes bigint NOT NULL"),
    ("prefixstore_meta", "PRIMARY KEY (id)"),
    ("prefixstore_rows", "key bytea NOT NULL"),
    ("prefixstore_rows", "value bytea NOT NULL"),
    ("prefixstore_rows", "payload_bytes bigint"),
    ("prefixstore_rows", "PRIMARY KEY (key)"),
    ("prefixstore_payloads", "key bytea NOT NULL"),
    ("prefixstore_payloads", "piece integer NOT NULL"),
    ("prefixstore_payloads", "data bytea NOT NULL"),
    ("prefixstore_payloads", "PRIMARY KEY (key, piece)"),
    (VERSION_TABLE, "version_num character varying(32) NOT NULL"),
    (VERSION_TABLE, "PRIMARY KEY (version_num)"),
}


def plain_tables(driver: psycopg.Connection[Any], where: str) -> set[str]:
    """The names of our tables that there are. None runs code when it is used, or has an owner who need not be trusted.

    Raises
    ------
    IncompatibleError
        If one does. Nothing has been read from it.
    """
    found = set()
    for _, name, owner, is_trusted, wrong in driver.execute(_TABLES):
        if not is_trusted:
            raise IncompatibleError(
                f"{where}: the table {name} belongs to the role {owner}, which could change what is stored; if that "
                "role is trusted, make it the owner of the schema or of the database, else choose another database or "
                "schema"
            )
        if wrong:
            raise _refused(where, f"{name} {wrong}")
        found.add(name)
    for table, kind, name in sorted(driver.execute(_ATTACHED)):
        raise _refused(where, f"{table} has the {kind} {name}")
    return found


def require_our_columns(driver: psycopg.Connection[Any], where: str) -> None:
    """Refuse tables whose columns, types or constraints differ from those of the newest revision.

    Raises
    ------
    IncompatibleError
        If there is one.
    """
    found = set(driver.execute(_COLUMNS))
    for table, what in sorted(found - COLUMNS):
        raise _refused(where, f"{table} has {what}")
    for table, what in sorted(COLUMNS - found):
        raise _refused(where, f"{table} lacks {what}")


def _refused(where: str, what: str) -> IncompatibleError:
    return IncompatibleError(
        f"{where}: the tables are not as prefixstore made them: {what}; undo that, or choose another database or schema"
    )

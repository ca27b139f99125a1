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

__all__ = ["SET_SEARCH_PATH", "our_tables", "require_our_columns"]

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

# The tables of the schema that is on the search path: name, owner, whether that owner is trusted, and what there is of
# them: whether that runs code or may change what is stored, and its description; columns, primary and foreign keys and
# all else that may reject a row. An owner is trusted who could change them anyway, of whose role this one is a member
# (but a superuser is one of every role), or who owns a schema that was named. "$user", which is used unless another is
# named, may have been created by anyone. From PostgreSQL 18 on NOT NULL is a constraint too.
_TABLES = f"""
SELECT c.relname::pg_catalog.text, pg_catalog.pg_get_userbyid(c.relowner)::pg_catalog.text,
    owner.rolsuper OR c.relowner IN (me.oid, d.datdba)
        OR (NOT me.rolsuper AND pg_catalog.pg_has_role(me.oid, c.relowner, 'MEMBER'))
        OR (c.relowner = n.nspowner AND n.nspname <> me.rolname),
    found.is_refused, found.what
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles AS owner ON owner.oid = c.relowner
JOIN pg_catalog.pg_roles AS me ON me.rolname = current_user
JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
LEFT JOIN LATERAL (
    SELECT true AS is_refused, 'is not an ordinary, logged table' AS what
    WHERE (c.relkind, c.relpersistence) <> ('r', 'p')
    UNION ALL SELECT true, 'has row-level security' WHERE c.relrowsecurity
    UNION ALL SELECT true, pg_catalog.concat('has the trigger ', tgname)
    FROM pg_catalog.pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal
    UNION ALL SELECT true, pg_catalog.concat('has the rule ', rulename)
    FROM pg_catalog.pg_rewrite WHERE ev_class = c.oid AND c.relkind = 'r'
    UNION ALL SELECT true, pg_catalog.concat('has the child table ', inhrelid::pg_catalog.regclass)
    FROM pg_catalog.pg_inherits WHERE inhparent = c.oid
    UNION ALL SELECT true, pg_catalog.concat('has the parent table ', inhparent::pg_catalog.regclass)
    FROM pg_catalog.pg_inherits WHERE inhrelid = c.oid
    UNION ALL SELECT false, pg_catalog.concat(attname, ' ', pg_catalog.format_type(atttypid, atttypmod),
        CASE WHEN attnotnull THEN ' NOT NULL' END,
        CASE WHEN atthasdef OR attidentity <> '' THEN ' with a default' END)
    FROM pg_catalog.pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
    UNION ALL SELECT false, pg_catalog.pg_get_constraintdef(oid)
    FROM pg_catalog.pg_constraint WHERE conrelid = c.oid AND contype <> 'n'
) AS found ON true
WHERE n.nspname = ANY (pg_catalog.current_schemas(false)) AND c.relname IN ({_NAMED})
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


def our_tables(driver: psycopg.Connection[Any], where: str) -> dict[str, set[str]]:
    """Our tables that there are, and their columns and constraints.

    Raises
    ------
    IncompatibleError
        If one runs code when it is used, or has an owner who need not be trusted. Nothing has been read from it.
    """
    tables: dict[str, set[str]] = {}
    for name, owner, is_trusted, is_refused, what in driver.execute(_TABLES):
        if not is_trusted:
            raise IncompatibleError(
                f"{where}: the table {name} belongs to the role {owner}, which could change what is stored; if that "
                "role is trusted, make it the owner of the schema or of the database, else choose another database or "
                "schema"
            )
        if is_refused:
            raise _refused(where, f"{name} {what}")
        tables.setdefault(name, set()).add(what)
    return tables


def require_our_columns(tables: dict[str, set[str]], where: str) -> None:
    """Refuse tables whose columns, types or constraints differ from those of the newest revision.

    Raises
    ------
    IncompatibleError
        If there is one.
    """
    found = {(table, what) for table, columns in tables.items() for what in columns}
    for table, what in sorted(found - COLUMNS):
        raise _refused(where, f"{table} has {what}")
    for table, what in sorted(COLUMNS - found):
        raise _refused(where, f"{table} lacks {what}")


def _refused(where: str, what: str) -> IncompatibleError:
    return IncompatibleError(
        f"{where}: the tables are not as prefixstore made them: {what}; undo that, or choose another database or schema"
    )

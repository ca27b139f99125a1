"""Whether the tables of a PostgreSQL store are as the migrations made them.

Another role may have created tables of these names first, or may have put triggers, rules or policies on them. Such
code runs with the rights of the user of the table, and may change what is stored. So the server's catalogs are asked
before anything is read from a table. All names are qualified with ``pg_catalog``, so no other schema can provide a
function.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Connection
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import PrimaryKeyConstraint

from prefixstore.backends.sql.schema import METADATA, VERSION_TABLE
from prefixstore.errors import IncompatibleError

__all__ = ["SET_SEARCH_PATH", "require_our_columns", "require_plain_tables"]

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call] # SQLAlchemy does not annotate it
NAMES = sorted([*METADATA.tables, VERSION_TABLE])
_NAMED = ", ".join(f"'{name}'" for name in NAMES)

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

# The tables of the schema that is on the search path. An owner is trusted who could change them anyway, of whose role
# this one is a member (but a superuser is one of every role), or who owns a schema that was named. "$user", which is
# used unless another is named, may have been created by anyone.
_TABLES = f"""
SELECT c.oid, c.relname::pg_catalog.text AS name, c.relkind::pg_catalog.text AS kind,
    c.relpersistence::pg_catalog.text AS persistence, c.relrowsecurity AS has_policies,
    pg_catalog.pg_get_userbyid(c.relowner)::pg_catalog.text AS owner,
    owner.rolsuper OR c.relowner IN (me.oid, d.datdba)
        OR (NOT me.rolsuper AND pg_catalog.pg_has_role(me.oid, c.relowner, 'MEMBER'))
        OR (c.relowner = n.nspowner AND n.nspname <> me.rolname) AS is_trusted
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles AS owner ON owner.oid = c.relowner
JOIN pg_catalog.pg_roles AS me ON me.rolname = current_user
JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
WHERE n.nspname = ANY (pg_catalog.current_schemas(false)) AND c.relname IN ({_NAMED})
"""  # noqa: S608 - constants
_OURS = f"SELECT oid FROM ({_TABLES}) AS ours"  # noqa: S608 - constants

# what is attached to these tables: kind, table, name
_ATTACHED = f"""
SELECT 'trigger', tgrelid::pg_catalog.regclass::pg_catalog.text, tgname::pg_catalog.text FROM pg_catalog.pg_trigger
WHERE tgrelid IN ({_OURS}) AND NOT tgisinternal
UNION ALL SELECT 'rule', ev_class::pg_catalog.regclass::pg_catalog.text, rulename::pg_catalog.text
FROM pg_catalog.pg_rewrite WHERE ev_class IN ({_OURS})
UNION ALL SELECT 'child table', inhparent::pg_catalog.regclass::pg_catalog.text,
    inhrelid::pg_catalog.regclass::pg_catalog.text
FROM pg_catalog.pg_inherits WHERE inhparent IN ({_OURS})
UNION ALL SELECT 'parent table', inhrelid::pg_catalog.regclass::pg_catalog.text,
    inhparent::pg_catalog.regclass::pg_catalog.text
FROM pg_catalog.pg_inherits WHERE inhrelid IN ({_OURS})
"""  # noqa: S608 - constants

_COLUMNS = f"""
SELECT ours.name, a.attname::pg_catalog.text,
    pg_catalog.format_type(a.atttypid, a.atttypmod)
    || CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE '' END
    || CASE WHEN a.atthasdef OR a.attidentity <> '' THEN ' with a default' ELSE '' END
FROM ({_TABLES}) AS ours JOIN pg_catalog.pg_attribute AS a ON a.attrelid = ours.oid
WHERE a.attnum > 0 AND NOT a.attisdropped
"""  # noqa: S608 - constants

# primary and foreign keys, and all else that may reject a row; from PostgreSQL 18 on NOT NULL is a constraint too
_CONSTRAINTS = f"""
SELECT ours.name, pg_catalog.pg_get_constraintdef(k.oid)
FROM ({_TABLES}) AS ours JOIN pg_catalog.pg_constraint AS k ON k.conrelid = ours.oid
WHERE k.contype <> 'n'
"""  # noqa: S608 - constants


def require_plain_tables(connection: Connection, where: str) -> None:
    """Refuse tables of these names that run code when they are used, or whose owner need not be trusted.

    Raises
    ------
    IncompatibleError
        If there is one. Nothing has been read from it.
    """
    for table in connection.exec_driver_sql(_TABLES):
        if not table.is_trusted:
            raise IncompatibleError(
                f"{where}: the table {table.name} belongs to the role {table.owner}, which could change what is "
                "stored; if that role is trusted, make it the owner of the schema or of the database, else choose "
                "another database or schema"
            )
        if (table.kind, table.persistence) != ("r", "p"):
            raise _refused(where, f"{table.name} is not an ordinary, logged table")
        if table.has_policies:
            raise _refused(where, f"{table.name} has row-level security")
    attached = connection.exec_driver_sql(_ATTACHED).all()
    if attached:
        kind, table_name, name = min(map(tuple, attached))
        raise _refused(where, f"{table_name} has the {kind} {name}")


def require_our_columns(connection: Connection, where: str) -> None:
    """Refuse tables whose columns, types or constraints differ from those of the newest revision.

    Raises
    ------
    IncompatibleError
        If there is one.
    """
    for statement, expected in ((_COLUMNS, _expected_columns()), (_CONSTRAINTS, _expected_constraints())):
        found = {tuple(map(str, row)) for row in connection.exec_driver_sql(statement)}
        for table, *more in sorted(found - expected):
            raise _refused(where, f"{table} has {' '.join(more)}")
        for table, *more in sorted(expected - found):
            raise _refused(where, f"{table} lacks {' '.join(more)}")


def _refused(where: str, what: str) -> IncompatibleError:
    return IncompatibleError(
        f"{where}: the tables are not as prefixstore made them: {what}; undo that, or choose another database or schema"
    )


def _expected_columns() -> set[tuple[str, ...]]:
    columns = {
        (table.name, column.name, _definition(column)) for table in METADATA.sorted_tables for column in table.columns
    }
    return columns | {(VERSION_TABLE, "version_num", "character varying(32) NOT NULL")}


def _definition(column: Column[Any]) -> str:
    """A column as `_COLUMNS` writes it."""
    name = column.type.compile(_DIALECT).lower().replace("varchar", "character varying")
    null = "" if column.nullable else " NOT NULL"
    return name + null + (" with a default" if column.server_default is not None else "")


def _expected_constraints() -> set[tuple[str, ...]]:
    expected: set[tuple[str, ...]] = {(VERSION_TABLE, "PRIMARY KEY (version_num)")}
    for table in METADATA.sorted_tables:
        for constraint in table.constraints:
            names = ", ".join(column.name for column in constraint.columns)  # type: ignore[attr-defined] # of a unique one
            if isinstance(constraint, PrimaryKeyConstraint):
                expected.add((table.name, f"PRIMARY KEY ({names})"))
    return expected

"""What Alembic runs: migrations on the connection of ``prefixstore.backends.sql.migrations``, or as SQL text."""

from __future__ import annotations

from alembic import context

from prefixstore.backends.sql.migrations import VERSION_TABLE

connection = context.config.attributes.get("connection")
if context.is_offline_mode():
    context.configure(
        dialect_name=context.config.attributes["dialect"],
        version_table=VERSION_TABLE,
        literal_binds=True,
        output_buffer=context.config.output_buffer,
        transactional_ddl=True,
    )
else:
    context.configure(connection=connection, version_table=VERSION_TABLE, transactional_ddl=True)

with context.begin_transaction():
    context.run_migrations()

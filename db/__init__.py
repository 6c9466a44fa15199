"""The trajectory store: what is legal is said by the schema, what happened is said by its rows.

`models` is the index of tables; `store` opens a pool; `runs`, `admission`, `episodes`, `groups`, `engines`,
`evaluations` and `events` are the statements over it; `registration` is the door for new runs, `external` the one for
trainers of users' own; `migrate` brings a database to this schema.
"""

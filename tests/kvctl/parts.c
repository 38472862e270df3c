/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl's parts, without a daemon: units, text, JSON, tables, the command line. */
#include <errno.h>
#include <string.h>

#include "ipc/base/text.h"
#include "ipc/base/util.h"
#include "tests/lib/suite.h"
#include "tools/kvctl/answer.h"
#include "tools/kvctl/args.h"
#include "tools/kvctl/graph.h"
#include "tools/kvctl/keys.h"
#include "tools/kvctl/text.h"

/* ---- units ----------------------------------------------------------------------------------- */

static void assert_unit(enum unit unit, double value, const char *expected) {
        char text[UNIT_TEXT_MAX];

        unit_format(unit, value, text);
        ck_assert_str_eq(text, expected);
}

START_TEST(units_of_bytes) {
        assert_unit(UNIT_BYTES, 0, "0 B");
        assert_unit(UNIT_BYTES, 1023, "1023 B");
        assert_unit(UNIT_BYTES, 1024, "1.0 KiB");
        assert_unit(UNIT_BYTES, 1.5 * (1 << 30), "1.5 GiB");
        assert_unit(UNIT_BYTES, 1023.6 * 1024, "1.0 MiB"); /* not "1024 KiB" */
        assert_unit(UNIT_BYTES, 1e30, "888178419700125 PiB");
}
END_TEST

START_TEST(units_of_time) {
        assert_unit(UNIT_MS, 0, "0 ms");
        assert_unit(UNIT_MS, 12, "12 ms");
        assert_unit(UNIT_MS, 999, "999 ms");
        assert_unit(UNIT_MS, 3400, "3.4 s");
        assert_unit(UNIT_MS, 59999, "1 min 0 s"); /* not "60.0 s" */
        assert_unit(UNIT_MS, 303e3, "5 min 3 s");
        assert_unit(UNIT_MS, 7500e3, "2 h 5 min");
        assert_unit(UNIT_MS, 180000e3, "2 d 2 h");
        assert_unit(UNIT_US, 30, "30 us");
        assert_unit(UNIT_US, 1234, "1.2 ms");
}
END_TEST

START_TEST(units_of_counts) {
        char text[UNIT_TEXT_MAX];

        unit_format_u64(UNIT_COUNT, UINT64_MAX, text);
        ck_assert_str_eq(text, "18446744073709551615");
        assert_unit(UNIT_SHORT, 0, "0");
        assert_unit(UNIT_SHORT, 0.25, "0.2");
        assert_unit(UNIT_SHORT, 999, "999");
        assert_unit(UNIT_SHORT, 999.7, "1.0 k");
        assert_unit(UNIT_SHORT, 1234567, "1.2 M");
        assert_unit(UNIT_SHARE, 0.875, "87.5 %");
}
END_TEST

/* ---- text ------------------------------------------------------------------------------------ */

START_TEST(text_is_made_safe) {
        static const char evil[] = "a\033[31mb\xc2\x9b"
                                   "c\xff\xe4\xb8\xad\xed\xa0\x80";
        char to[64] = "";
        FILE *file = fmemopen(to, sizeof to, "w");

        text_put(file, evil, sizeof evil - 1);
        fclose(file);
        ck_assert_str_eq(to, "a?[31mb?c?\xe4\xb8\xad???"); /* a surrogate is three wrong bytes */
}
END_TEST

START_TEST(text_wraps_at_spaces) {
        char to[64] = "";
        FILE *file = fmemopen(to, sizeof to, "w");

        kvd_put_wrapped(file, "one two three", 8, 2);
        fclose(file);
        ck_assert_str_eq(to, "one two\n  three");
}
END_TEST

START_TEST(text_distances) {
        ck_assert_uint_eq(kvd_distance("stauts", "status"), 1); /* a swapped pair */
        ck_assert_uint_eq(kvd_distance("kitten", "sitting"), 3);
        ck_assert_uint_eq(kvd_distance("", "abc"), 3);
        ck_assert_uint_eq(kvd_distance("same", "same"), 0);
}
END_TEST

START_TEST(text_is_cut_by_characters) {
        char to[64] = "";
        FILE *file = fmemopen(to, sizeof to, "w");
        static const char text[] = "\033[1mab\xc3\xa4"
                                   "de\033[0m\nxy\n";

        text_put_cut(file, text, sizeof text - 1, 3);
        fclose(file);
        ck_assert_str_eq(to, "\033[1mab\xc3\xa4\033[0m\nxy\n");
}
END_TEST

START_TEST(keys_out_of_bytes) {
        static const struct {
                const char *bytes;
                int key;
                size_t used;
        } rows[] = {{"q", 'q', 1},
                    {"\033[C", KEY_RIGHT, 3},
                    {"\033OD", KEY_LEFT, 3},
                    {"\033[1;5Aq", KEY_UP, 6},
                    {"\033[6~", KEY_PAGE_DOWN, 4},
                    {"\033[15~", KEY_NONE, 5},
                    {"\033", KEY_NONE, 1},
                    {"\033[", KEY_NONE, 1},
                    {"\033[12", KEY_NONE, 4},
                    {"", KEY_NONE, 0}};

        for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
                size_t used, n = strlen(rows[i].bytes);

                ck_assert_int_eq(key_read(rows[i].bytes, n, &used), rows[i].key);
                ck_assert_uint_eq(used, rows[i].used);
        }
}
END_TEST

static void assert_graph(void (*draw)(FILE *, const struct screen *, const double *, size_t),
                         const double *values, size_t n, bool utf8, const char *expected) {
        char to[128] = "";
        struct screen screen = {.utf8 = utf8};
        FILE *file = fmemopen(to, sizeof to, "w");

        draw(file, &screen, values, n);
        fclose(file);
        ck_assert_str_eq(to, expected);
}

START_TEST(graphs_of_one_line) {
        static const double values[] = {-1, 0, 0.001, 0.5, 1, 7};
        static const struct share shares[] = {{0.25, "31"}, {0.5, "32"}};
        char to[64] = "";
        struct screen screen = {0};
        FILE *file = fmemopen(to, sizeof to, "w");

        assert_graph(graph_history, values, 6, false, " ..=@@");
        assert_graph(graph_history, values, 5, true, " ▁▁▄█");
        assert_graph(graph_heat, values + 1, 5, false, ".:+@@");
        graph_bar(file, &screen, 8, shares, 2);
        fclose(file);
        ck_assert_str_eq(to, "[##====..]");
}
END_TEST

/* ---- tables and JSON ------------------------------------------------------------------------- */

static const struct column columns[] = {
        {"domain", "DOMAIN", UNIT_NONE | COLUMN_QUIET},
        {"name", "NAME", UNIT_NONE},
        {"size.bytes", "SIZE", UNIT_BYTES},
        {"size.exact", NULL, UNIT_NONE},
        {"used", "USED", UNIT_SHARE},
        {"on", "ON", UNIT_NONE},
        {"ids", "IDS", UNIT_NONE},
};

static void fill_row(struct table *t, const char *domain, const char *name, uint64_t bytes) {
        static const uint32_t ids[] = {1, 2, 3};

        table_string(t, domain);
        table_string(t, name);
        table_number(t, bytes);
        table_number(t, bytes);
        table_share(t, 1, bytes ? 8 : 0);
        table_flag(t, bytes > 0);
        table_ids(t, ids, bytes ? 3 : 0);
}

static char *printed(const struct answer *answer) {
        char *text = NULL;
        size_t size;
        FILE *to = open_memstream(&text, &size);
        struct screen screen = {.to = to};

        ck_assert_int_eq(answer_print(answer, &screen), 0);
        fclose(to);
        return text;
}

static char *as_json(const struct answer *answer) {
        json_t *json = answer_json(answer);
        char *text = json_dumps(json, JSON_REAL_PRECISION(9));

        json_decref(json);
        ck_assert_ptr_nonnull(text);
        return text;
}

static struct answer *two_rows(const char *domain) {
        struct answer *answer = answer_new();
        struct table *t = ANSWER_ROWS(answer, "things", columns);

        fill_row(t, "home", "a", 0);
        fill_row(t, domain, "long name", 1536);
        answer_say(answer, "two %s", "things");
        return answer;
}

START_TEST(table_for_people) {
        _cleanup_(answer_freep) struct answer *answer = two_rows("home");
        _cleanup_(freep) char *text = printed(answer);

        ck_assert_str_eq(text, "NAME          SIZE    USED  ON   IDS\n"
                               "a              0 B       -  no   \n"
                               "long name  1.5 KiB  12.5 %  yes  1 2 3\n"
                               "\n"
                               "two things\n");
}
END_TEST

START_TEST(quiet_column_speaks_up) {
        _cleanup_(answer_freep) struct answer *answer = two_rows("away");
        _cleanup_(freep) char *text = printed(answer);

        ck_assert_ptr_nonnull(strstr(text, "DOMAIN  NAME"));
        ck_assert_ptr_nonnull(strstr(text, "away    long name"));
}
END_TEST

START_TEST(table_for_programs) {
        _cleanup_(answer_freep) struct answer *answer = two_rows("home");
        _cleanup_(freep) char *text = as_json(answer);

        ck_assert_str_eq(text, "{\"things\": [{\"domain\": \"home\", \"name\": \"a\", "
                               "\"size\": {\"bytes\": 0, \"exact\": 0}, "
                               "\"used\": null, \"on\": false, \"ids\": []}, "
                               "{\"domain\": \"home\", \"name\": \"long name\", "
                               "\"size\": {\"bytes\": 1536, \"exact\": 1536}, "
                               "\"used\": 0.125, \"on\": true, \"ids\": [1, 2, 3]}]}");
}
END_TEST

static struct answer *record(const char *text, size_t n) {
        static const struct column fields[] = {{"text", "text", UNIT_NONE},
                                               {"most", "number", UNIT_BYTES},
                                               {"none", "none", UNIT_NONE}};
        struct answer *answer = answer_new();
        struct table *t = ANSWER_RECORD(answer, "thing", fields);

        table_text(t, text, n);
        table_number(t, INT64_MAX);
        table_none(t);
        return answer;
}

START_TEST(record_in_both_forms) {
        static const char evil[] = "q\" b\\ n\n u\x01 \xff \xe4\xb8\xad";
        _cleanup_(answer_freep) struct answer *answer = record(evil, sizeof evil - 1);
        _cleanup_(freep) char *text = printed(answer), *json = as_json(answer);

        ck_assert_str_eq(text, "text    q\" b\\ n? u? \xef\xbf\xbd \xe4\xb8\xad\n"
                               "number  8192 PiB\n");
        ck_assert_str_eq(json, "{\"thing\": {\"text\": "
                               "\"q\\\" b\\\\ n\\n u\\u0001 \xef\xbf\xbd \xe4\xb8\xad\", "
                               "\"most\": 9223372036854775807, \"none\": null}}");
}
END_TEST

/* The names of the things, in their order. */
static void assert_names(const struct answer *answer, const char *expected) {
        json_t *json = answer_json(answer), *row;
        char names[32] = "";
        size_t i;

        json_array_foreach(json_object_get(json, "things"), i, row)
                strcat(names, json_string_value(json_object_get(row, "name")));
        json_decref(json);
        ck_assert_str_eq(names, expected);
}

START_TEST(rows_sort_and_cut) {
        _cleanup_(answer_freep) struct answer *answer = answer_new();
        struct table *t = ANSWER_ROWS(answer, "things", columns);
        static const uint64_t sizes[] = {3, 9, 1, 9};
        static const char *const names[] = {"a", "b", "c", "d"};

        for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
                fill_row(t, "home", names[i], sizes[i]);
        table_sort(t, 2, false);
        table_cut(t, 3);
        fill_row(t, "home", "e", 5);
        ck_assert_uint_eq(table_rows(t), 4);
        assert_names(answer, "bdae");
        table_sort(t, 1, true);
        assert_names(answer, "abde");
}
END_TEST

/* ---- command line ---------------------------------------------------------------------------- */

static struct args args;
static struct kvd_why why;

/* Splits at spaces; sets args and why. */
static int parse(const char *line) {
        static char words[256];
        char *argv[32] = {(char *)"kvctl"}, *save = NULL;
        int argc = 1;

        snprintf(words, sizeof words, "%s", line);
        for (char *word = strtok_r(words, " ", &save); word; word = strtok_r(NULL, " ", &save))
                argv[argc++] = word;
        why.line[0] = 0;
        return args_parse(&args, argc, argv, &why);
}

START_TEST(args_understood) {
        ck_assert_int_eq(parse("--json blocks llama --rows=7 --watch 0.5"), 0);
        ck_assert_str_eq(args.verb->name, "blocks");
        ck_assert_str_eq(args.operand[0], "llama");
        ck_assert_uint_eq(args.number[FLAG_ROWS], 7);
        ck_assert(args.seconds[FLAG_WATCH] == 0.5 && args_has(&args, FLAG_JSON) &&
                  !args_has(&args, FLAG_LIMIT));
        ck_assert_int_eq(parse("space set llama policy=fifo"), 0);
        ck_assert_str_eq(args.verb->name, "space set");
        ck_assert_uint_eq(args.n_operands, 2);
        ck_assert_int_eq(parse("top -n3 -w 2"), 0);
        ck_assert_uint_eq(args.number[FLAG_COUNT], 3);
        ck_assert_int_eq(parse("space create --help"), 0);
        ck_assert_int_eq(parse(""), 0);
        ck_assert_ptr_null(args.verb);
}
END_TEST

static const struct {
        const char *line, *says;
} mistakes[] = {
        {"stauts", "no verb \"stauts\"; did you mean \"status\"?"},
        {"space creat x", "no verb \"space creat\"; did you mean \"space create\"?"},
        {"xyzzy", "no verb \"xyzzy\"; \"kvctl --help\" lists them"},
        {"blocks --row 3", "no option --row; did you mean --rows?"},
        {"--row 3 blocks", "no option --row; did you mean --rows?"},
        {"blocks -x", "no option -x; \"kvctl --help\" lists them"},
        {"blocks --limit 3", "\"blocks\" takes no --limit"},
        {"blocks --rows", "--rows wants a value"},
        {"blocks --rows -3", "--rows takes a whole number, not \"-3\""},
        {"blocks --rows 99999999999999999999", "--rows takes a whole number"},
        {"blocks --watch nan", "--watch takes a number from 0.01 to 86400, not \"nan\""},
        {"blocks --json=yes", "--json takes no value"},
        {"blocks a b", "\"blocks\" does not know what to do with \"b\""},
        {"space set", "\"space set\" wants NAME KEY=VALUE..."},
        {"space create x --layers 2", "\"space create\" wants --kv-heads N"},
        {"space create x --block-bytes 256", "\"space create\" wants --layout NAME"},
        {"space create x --layers 2 --layout v1", "\"space create\" wants --block-bytes N"},
};

START_TEST(args_refused) {
        ck_assert_int_eq(parse(mistakes[_i].line), -EINVAL);
        ck_assert_msg(strstr(why.line, mistakes[_i].says) != NULL, "%s: %s", mistakes[_i].line,
                      why.line);
}
END_TEST

START_TEST(every_example_is_understood) {
        const char *example = verbs[_i].example;
        char line[256];

        snprintf(line, sizeof line, "%.*s", (int)strcspn(example, "|&>"),
                 example + strlen("kvctl "));
        line[strcspn(line, "|&>")] = 0;
        ck_assert_int_eq(strncmp(example, "kvctl ", 6), 0);
        ck_assert_msg(parse(line) == 0, "%s: %s", example, why.line);
        ck_assert_str_eq(args.verb->name, verbs[_i].name);
}
END_TEST

SUITE("kvctl",
      TESTS(units_of_bytes, units_of_time, units_of_counts, text_is_made_safe, text_wraps_at_spaces,
            text_distances, text_is_cut_by_characters, keys_out_of_bytes, graphs_of_one_line,
            table_for_people, quiet_column_speaks_up, table_for_programs, record_in_both_forms,
            rows_sort_and_cut, args_understood),
      LOOPS(ARRAY_SIZE(mistakes), args_refused), LOOPS(n_verbs, every_example_is_understood))

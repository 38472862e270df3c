/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The configuration: each mistake is reported in one line with its position, and the printed
 * configuration can be read back.
 */

#include <stdlib.h>
#include <string.h>

#include "daemon/main/options.h"
#include "ipc/base/util.h"
#include "tests/lib/suite.h"

static char path[64];
static struct kvd_why why;
static struct config config;

static void setup(void) {
        int fd;

        strcpy(path, "/tmp/kvd-config-XXXXXX");
        fd = mkstemp(path);
        ck_assert_int_ge(fd, 0);
        close(fd);
        ck_assert_int_eq(config_init(&config), 0);
}

static void teardown(void) {
        config_clear(&config);
        unlink(path);
}

static int read_text(const char *text) {
        FILE *f = fopen(path, "w");
        int r;

        fputs(text, f);
        fclose(f);
        r = config_read(&config, path, false, NULL, &why);
        return r < 0 ? r : config_check(&config, &why);
}

#define NO_BYTES " is not a size; write bytes, with K, M, G or T, such as 512M or 8G"
#define NO_MEMORY \
        " is not a size; write bytes, with K, M, G or T, or % of memory, such as 512M or 8G"

static const struct {
        const char *text, *why; /* why: without the file's name */
} mistakes[] = {
        {"pool = 1G\n", ":1: 'pool = 1G' is before the first section; write [daemon] above it"},
        {"[daemon]\n\npoll = 1G\n", ":3: [daemon] has no option 'poll'; see kvd --print-config"},
        {"[daemon]\npool\n",
         ":2: 'pool' is neither a section nor an assignment; write key = value"},
        {"[daemon]\npool = lots\n", ":2: pool: 'lots'" NO_MEMORY},
        {"[daemon]\npool = 101%\n", ":2: pool: '101%'" NO_MEMORY},
        {"[daemon]\npool = 1K\n",
         ":2: pool: '1K' is out of range; at least 4096K, at most 262144G"},
        {"[daemon]\npool = 99999999999T\n", ":2: pool: '99999999999T'" NO_MEMORY},
        {"[daemon]\nsegment = 10%\n", ":2: segment: '10%'" NO_BYTES},
        {"[daemon]\npages = large\n",
         ":2: pages: 'large' is not known; write one of auto|small|huge"},
        {"[daemon]\npages = aut\n", ":2: pages: 'aut' is not known; write one of auto|small|huge"},
        {"[daemon]\nsocket = kvd.sock\n",
         ":2: socket: 'kvd.sock' is not a path; write one that begins with / or, if "
         "abstract, with @"},
        {"[daemon]\nsocket_mode = 0888\n",
         ":2: socket_mode: '0888' is not a mode; write octal digits, such as 0660"},
        {"[daemon]\nmax_clients = 0\n", ":2: max_clients: '0' is not a number from 1 to 4096"},
        {"[daemon]\nmax_clients = -1\n", ":2: max_clients: '-1' is not a number from 1 to 4096"},
        {"[daemon]\nadmins = root, no-such-user\n",
         ":2: admins: there is no user 'no-such-user' on this machine; create it or write its "
         "number"},
        {"[daemon\n", ":1: '[daemon' lacks its closing bracket"},
        {"[daemon]\n[daemon]\n",
         ":2: [daemon] was opened before; put everything about it in one section"},
        {"[domain a]\n[domain a]\n",
         ":2: domain 'a' was described before; put everything about it in one section"},
        {"[domain]\n", ":1: there is no section [domain]; there are [daemon] and [domain NAME]"},
        {"[tenant a]\n",
         ":1: there is no section [tenant a]; there are [daemon] and [domain NAME]"},
        {"[domain a/b]\n", ":1: 'a/b' cannot name a domain; use 1 to 63 of A-Z a-z 0-9 . _ -"},
        {"[domain uid-5]\n",
         ":1: 'uid-5': names with uid- in front are those of unlisted users; choose another"},
        {"[domain a]\nisolation = none\n",
         ":2: isolation: 'none' is not known; write one of shared|arena"},
        /* settings given twice, invisible bytes, and comments after a value */
        {"[daemon]\npool = 1G\nsegment = 1M\npool = 1G\n",
         ":4: pool was set in line 2; keep one of the two"},
        {"[daemon]\nquarantine_ms = 1\n[domain a]\nquota = 1M\nquota = 2M\n",
         ":5: quota was set in line 4; keep one of the two"},
        {"\xef\xbb\xbf[daemon]\n",
         ":1: the file begins with a byte order mark; save it as UTF-8 without one"},
        {"\xff\xfe[", ":1: the file begins with a byte order mark; save it as UTF-8 without one"},
        {"[daemon]\rpool = 1G\r", ":1: byte 9 is a control character (0x0d); remove it"},
        {"[daemon]\n# \x1b[1m\n", ":2: byte 3 is a control character (0x1b); remove it"},
        {"[daemon]\npool\xc2\xa0= 1G\n",
         ":2: byte 5 begins an invisible character, such as a no-break space; remove it"},
        {"[daemon]\nremote = redis://h\xe2\x80\x8b\n",
         ":2: byte 19 begins an invisible character, such as a no-break space; remove it"},
        {"[daemon]\nsocket = /run/kvd.sock # ours\n",
         ":2: socket: '/run/kvd.sock # ours': write a comment in a line of its own"},
        {"[daemon]\nremote = redis://h ; ours\n",
         ":2: remote: 'redis://h ; ours': write a comment in a line of its own"},
};

START_TEST(a_mistake_has_a_place) {
        ck_assert_int_lt(read_text(mistakes[_i].text), 0);
        ck_assert_int_eq(strncmp(why.line, path, strlen(path)), 0);
        ck_assert_str_eq(why.line + strlen(path), mistakes[_i].why);
}
END_TEST

/* ---- bytes that an editor does not show ------------------------------------------------------ */

static int read_bytes(const char *text, size_t n, FILE *all) {
        FILE *f = fopen(path, "w");

        ck_assert_uint_eq(fwrite(text, 1, n, f), n);
        fclose(f);
        return config_read(&config, path, false, all, &why);
}

START_TEST(a_nul_byte_is_refused) {
        static const char text[] = "[daemon]\npool = 1G\0 but this\nlog = debug\n";
        static const char comment[] = "# \0\n[daemon]\n";

        ck_assert_int_lt(read_bytes(text, sizeof text - 1, NULL), 0);
        ck_assert_str_eq(why.line + strlen(path),
                         ":2: byte 10 is a control character (0x00); remove it");
        ck_assert_int_lt(read_bytes(comment, sizeof comment - 1, NULL), 0);
        ck_assert_str_eq(why.line + strlen(path),
                         ":1: byte 3 is a control character (0x00); remove it");
}
END_TEST

START_TEST(a_huge_file_is_refused) {
        FILE *f = fopen(path, "w");

        for (uint32_t i = 0; i < 1 << 19; i++)
                fputs("#\n", f);
        fclose(f);
        ck_assert_int_eq(config_read(&config, path, false, NULL, &why), 0);
        f = fopen(path, "a");
        fputs("#", f);
        fclose(f);
        ck_assert_int_lt(config_read(&config, path, false, NULL, &why), 0);
        ck_assert_str_eq(why.line + strlen(path),
                         ": it is larger than 1 MiB; is it a configuration?");
}
END_TEST

/* These files are accepted; a doubtful line ending is reported once. */
static const struct {
        const char *text, *named; /* named: without the file's name */
} named[] = {
        {"[daemon]\r\npool = 1G\r\n", ":1: lines end with CR LF; LF is enough\n"},
        {"[daemon]\npool = 1G\r\n", ":2: lines end with CR LF; LF is enough\n"},
        {"[daemon]\npool = 1G",
         ":2: the last line does not end with a newline; is the file complete?\n"},
        {"[daemon]\npool = 1G\n", ""},
        {"[daemon]\n\tpool\t=\t1G  \n\n# \xe2\x80\x8b in a comment\n", ""},
};

START_TEST(doubtful_line_endings_are_named) {
        const char *text = named[_i].text;
        char *said = NULL;
        size_t size;
        FILE *to = open_memstream(&said, &size);

        ck_assert_int_eq(read_bytes(text, strlen(text), to), 0);
        fclose(to);
        ck_assert_uint_eq(config.pool, 1u << 30);
        ck_assert_str_eq(said + (said[0] ? strlen(path) : 0), named[_i].named);
        free(said);
}
END_TEST

/* The rest of a long line is not parsed as another line. */
START_TEST(a_long_line_is_one_fault) {
        char text[5000], *said = NULL, expected[300];
        size_t size;
        FILE *to = open_memstream(&said, &size);

        memset(text, 'x', sizeof text);
        strcpy(text + sizeof text - 8, "\n[what\n");
        ck_assert_int_lt(read_bytes(text, strlen(text), to), 0);
        fclose(to);
        snprintf(expected, sizeof expected,
                 "%s:1: the line is longer than 2046 bytes; shorten it\n"
                 "%s:2: '[what' lacks its closing bracket\n",
                 path, path);
        ck_assert_str_eq(said, expected);
        free(said);
}
END_TEST

static const struct {
        const char *text, *why;
} contradictions[] = {
        {"[domain a]\nusers=7\n[domain b]\nusers=6,7\n",
         "user 7 is in domain 'a' and in domain 'b'; take it out of one"},
        {"[domain a]\nquota=1M\nguarantee=2M\n",
         "the guarantee of domain 'a' is larger than its quota; lower it"},
        {"[daemon]\npool=64M\n[domain a]\nguarantee=40M\n[domain b]\nguarantee=40M\n",
         "all guarantees together are larger than the pool (64 MiB); lower them"},
        {"[daemon]\npool=64M\npool_most=63M\n",
         "pool (64 MiB) is larger than pool_most; raise that, or leave it out"},
        {"[daemon]\npool=64M\nsegment=65M\n",
         "segment is larger than pool (64 MiB); lower it, or leave it out"},
        {"[daemon]\npool=64M\nsegment=63K\n",
         "segment is smaller than 64 KiB; raise it, or leave it out"},
};

START_TEST(a_contradiction_is_named) {
        ck_assert_int_lt(read_text(contradictions[_i].text), 0);
        ck_assert_str_eq(why.line, contradictions[_i].why);
}
END_TEST

START_TEST(a_good_file) {
        ck_assert_int_eq(
                read_text("# comment\n; another\n[daemon]\npool=1G\n  segment = 2M  \npages=huge\n"
                          "loop = epoll\nadmins = 5 6,7\r\n\n[domain red]\nusers=10\ngroups = 20, "
                          "21\n"
                          "quota=512M\n"
                          "[domain blue]\ngroups=21\nisolation=arena\n[domain last]"),
                0);
        ck_assert_uint_eq(config.pool, 1u << 30);
        ck_assert_uint_eq(config.segment, 2u << 20);
        ck_assert_uint_eq(config.pages, STORE_PAGES_HUGE);
        ck_assert(id_list_has(&config.admins, 7) && !id_list_has(&config.admins, 8));
        ck_assert_str_eq(config_find_domain(&config, 10, (uint32_t[]){21}, 1)->name, "red");
        ck_assert_str_eq(config_find_domain(&config, 11, (uint32_t[]){21}, 1)->name, "red");
        ck_assert_ptr_null(config_find_domain(&config, 11, (uint32_t[]){22}, 1));
        ck_assert_uint_eq(config.domains->next->isolation, CONFIG_ARENA);
}
END_TEST

START_TEST(a_long_line) {
        char line[4096];

        memset(line, '#', sizeof line);
        line[sizeof line - 1] = 0;
        ck_assert_int_lt(read_text(line), 0);
        ck_assert_str_eq(why.line + strlen(path),
                         ":1: the line is longer than 2046 bytes; shorten it");
}
END_TEST

/* Lines of a refused section are not reported in addition. */
START_TEST(all_mistakes_in_one_go) {
        struct options options = {.config = path, .instance = "0"};
        char *said = NULL, expected[1024];
        size_t size;
        FILE *to = open_memstream(&said, &size);

        ck_assert_int_lt(
                read_text("[daemon]\npoll = 1G\npool = lots\n[domain]\nusers = root\nquota = x\n"
                          "[domain a]\nusers = root\nquota = 1M\nisolation = none\n"),
                0);
        ck_assert_int_lt(options_check(&options, to), 0);
        fclose(to);
        snprintf(expected, sizeof expected,
                 "%s:2: [daemon] has no option 'poll'; see kvd --print-config\n"
                 "%s:3: pool: 'lots'%s\n"
                 "%s:4: there is no section [domain]; there are [daemon] and [domain NAME]\n"
                 "%s:10: isolation: 'none' is not known; write one of shared|arena\n",
                 path, path, NO_MEMORY, path, path);
        ck_assert_str_eq(said, expected);
        free(said);
}
END_TEST

START_TEST(a_missing_file) {
        unlink(path);
        ck_assert_int_eq(config_read(&config, path, true, NULL, &why), 0);
        ck_assert_int_lt(config_read(&config, path, false, NULL, &why), 0);
        ck_assert_str_eq(why.line + strlen(path), ": cannot be opened: No such file or directory; "
                                                  "give another with --config");
}
END_TEST

/* With its comment signs removed, the printed file is accepted and gives the defaults. */
START_TEST(the_printed_file_is_the_default) {
        FILE *f = fopen(path, "w");
        char *text = NULL, *at;
        size_t size;
        struct config again;

        config_print(f);
        fclose(f);
        f = open_memstream(&text, &size);
        config_print(f);
        fclose(f);
        for (at = text; (at = strstr(at, "\n#")); at++)
                if (at[2] != ' ')
                        at[1] = ' ';
        if (strstr(text, "[domain NAME]"))
                memcpy(strstr(text, "[domain NAME]"), "[domain x   ]", 13);
        ck_assert_msg(read_text(text) == 0, "%s", why.line);
        free(text);
        ck_assert_int_eq(config_init(&again), 0);
        ck_assert_str_eq(config.socket, again.socket);
        ck_assert_uint_eq(config.pool, again.pool);
        ck_assert_uint_eq(config.max_clients, again.max_clients);
        ck_assert_str_eq(config.domains->name, "x");
        config_clear(&again);
}
END_TEST

/* ---- command line ---------------------------------------------------------------------------- */

static int load(int argc, char **argv) {
        struct options options;
        int r = options_parse(&options, argc, argv, &why);

        config_clear(&config);
        return r < 0 ? r : options_load(&options, &config, &why);
}

START_TEST(the_command_line_wins) {
        char *argv[] = {"kvd",
                        "--config",
                        path,
                        "--pool",
                        "128M",
                        "--set",
                        "domain a.b.quota=3M",
                        "--set",
                        "domain new.users=9",
                        "--instance",
                        "3",
                        NULL};

        read_text("[daemon]\npool=1G\nsegment=1M\n[domain a.b]\nquota=1M\n");
        ck_assert_msg(load(11, argv) == 0, "%s", why.line);
        ck_assert_uint_eq(config.pool, 128u << 20);
        ck_assert_uint_eq(config.segment, 1u << 20);
        ck_assert_str_eq(config.socket, "/run/kvd-3.sock");
        ck_assert_uint_eq(config.domains->quota, 3u << 20);
        ck_assert(id_list_has(&config.domains->next->users, 9));
}
END_TEST

static const struct {
        char *argv[4];
        const char *why;
} bad_lines[] = {
        {{"kvd", "--pol"}, "no option --pol; did you mean --pool?"},
        {{"kvd", "--frobnicate"}, "no option --frobnicate; \"kvd --help\" lists them"},
        {{"kvd", "--set"}, "--set wants a value: --set SECTION.KEY=VALUE"},
        {{"kvd", "--keep=1"}, "--keep takes no value"},
        {{"kvd", "-x"}, "no option -x; \"kvd --help\" lists them"},
        {{"kvd", "-hxV"}, "no option -x; \"kvd --help\" lists them"},
        {{"kvd", "start"}, "'start' is not an option; see kvd --help"},
        {{"kvd", "--instance", "x"}, "--instance takes a number from 0 to 9999, not \"x\""},
        {{"kvd", "--set", "pool=1G"},
         "--set pool=1G: write section.key=value, such as daemon.pool=4G"},
        {{"kvd", "--set", "daemon.x=1"},
         "--set daemon.x=1: [daemon] has no option 'x'; see kvd --print-config"},
        {{"kvd", "--set", "x.y=1"},
         "--set x.y=1: there is no section [x]; there are [daemon] and [domain NAME]"},
        {{"kvd", "--config=/a", "--config-optional=/b"},
         "two configurations, /a and /b: only one is read; give one"},
        {{"kvd", "--pool", "x"}, "--set daemon.pool=x: pool: 'x'" NO_MEMORY},
};

START_TEST(bad_command_lines) {
        char *argv[5] = {0};
        int argc = 0;

        while (argc < 4 && bad_lines[_i].argv[argc]) {
                argv[argc] = bad_lines[_i].argv[argc];
                argc++;
        }
        ck_assert_int_lt(load(argc, argv), 0);
        ck_assert_str_eq(why.line, bad_lines[_i].why);
}
END_TEST

SUITE("config", FIXTURE(setup, teardown), LOOPS(ARRAY_SIZE(mistakes), a_mistake_has_a_place),
      LOOPS(ARRAY_SIZE(contradictions), a_contradiction_is_named),
      LOOPS(ARRAY_SIZE(named), doubtful_line_endings_are_named),
      TESTS(a_nul_byte_is_refused, a_huge_file_is_refused, a_long_line_is_one_fault),
      TESTS(a_good_file, a_long_line, all_mistakes_in_one_go, a_missing_file,
            the_printed_file_is_the_default, the_command_line_wins),
      LOOPS(ARRAY_SIZE(bad_lines), bad_command_lines))

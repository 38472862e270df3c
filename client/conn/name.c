/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The name of this process in kvctl clients and in the daemon's log: $KVD_NAME, or else its
 * program; for Python, its script or module.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/internal.h"
#include "ipc/base/text.h"

#define COMMAND_MAX 4096

/* Reads this process' arguments, each ended by a NUL; returns the number of bytes. */
static size_t read_command(char to[COMMAND_MAX]) {
        FILE *f = fopen("/proc/self/cmdline", "re");
        size_t n = f ? fread(to, 1, COMMAND_MAX - 1, f) : 0;

        if (f)
                fclose(f);
        to[n] = 0;
        return n;
}

static const char *next_word(const char *word, const char *end) {
        return word + strlen(word) < end ? word + strlen(word) + 1 : end;
}

static bool takes_value(const char *option) {
        return strcmp(option, "-W") == 0 || strcmp(option, "-X") == 0 || strcmp(option, "-m") == 0;
}

/* The script or the module; NULL if there is neither. */
static const char *python_name(char command[COMMAND_MAX]) {
        const char *end = command + read_command(command), *word = next_word(command, end);

        for (; word < end && word[0] == '-' && word[1]; word = next_word(word, end)) {
                bool module = strcmp(word, "-m") == 0;

                if (strcmp(word, "-c") == 0)
                        return NULL;
                if (takes_value(word))
                        word = next_word(word, end);
                if (module)
                        break;
        }
        return word < end && *word && strcmp(word, "-") != 0 ? word : NULL;
}

/* Copies the end of text, in whole characters. False: it is empty, or would break a log line. */
static bool take(const char *text, char to[KVD_NAME_MAX + 1]) {
        size_t n = strlen(text);

        if (!n || !kvd_is_plain(text, n))
                return false;
        for (; n > KVD_NAME_MAX; n--)
                text++;
        while (((unsigned char)*text & 0xc0) == 0x80)
                text++;
        strcpy(to, text);
        return true;
}

static const char *last_part(const char *path) {
        const char *slash = strrchr(path, '/');

        return slash && slash[1] ? slash + 1 : path;
}

void own_name(char to[KVD_NAME_MAX + 1]) {
        const char *program = program_invocation_short_name, *said = secure_getenv("KVD_NAME"),
                   *script;
        char command[COMMAND_MAX];

        if (said && take(said, to))
                return;
        script = strncmp(program, "python", 6) == 0 ? python_name(command) : NULL;
        if (!(script && take(last_part(script), to)) && !take(program, to))
                strcpy(to, "?");
}
